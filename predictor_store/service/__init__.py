"""Runs the prediction worker: its process, its sockets and its messages.

Import from `client` (PredictorClient, which asks), `supervisor` (SharedWorker, for several HTTP
processes), `link` (PredictorError) and the command in `serve_command`. From the inside out:
`worker` does the work and knows no socket. `server` is the event loop around it, which speaks
`messages` over the sockets of `endpoint`, and `http` for others. `worker_process` runs a server's
own worker, which `own_process` starts.
"""
