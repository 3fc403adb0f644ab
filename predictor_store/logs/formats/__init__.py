"""Contains a module for each format of logs; `predictor_store.logs.registry` lists them."""
