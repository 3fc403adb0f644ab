"""From a prompt to the distribution of its answer's length.

Doors: `asked` and `features` for the process that asks, which loads no encoder; `embedder`, `model`
(ModelHistory), `predictor` and `quality` for whoever predicts. `history`, `index`, `regression`,
`minilm` and `static_encoder` are what these rest on.
"""
