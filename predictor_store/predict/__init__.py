"""Predicts the distribution of an answer's length from its prompt.

HTTP processes import `asked` and `features`, which load no encoder. The process that predicts
imports `embedder`, `model` (ModelHistory), `predictor` and `quality`. These use `history`,
`index`, `regression`, `minilm` and `static_encoder`.
"""
