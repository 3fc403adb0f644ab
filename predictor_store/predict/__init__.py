"""Predicts the distribution of an answer's length from its prompt.

Doors: `asked` and `features` for the process that asks, which loads no encoder; `embedder`, `model`
(ModelHistory), `predictor` and `quality` for the process that predicts. These use `history`,
`index`, `regression`, `minilm` and `static_encoder`.
"""
