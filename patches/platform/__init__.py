"""SGLang on plain PyTorch, for hosts without an accelerator."""
