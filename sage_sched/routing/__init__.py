"""Which of several servers gets a request, and what each has yet to do."""

from sage_sched.routing.backlog import backlog_s
from sage_sched.routing.cluster_view import ClusterView
from sage_sched.routing.ledger import Ledger, Newcomer
from sage_sched.routing.prefix_index import BLOCK_TOKENS, block_keys
from sage_sched.routing.router import ROUTERS, Router, waiting_s

__all__ = [
    "BLOCK_TOKENS", "ROUTERS", "ClusterView", "Ledger", "Newcomer", "Router", "backlog_s",
    "block_keys", "waiting_s",
]  # fmt: skip
