"""The policies that come with the package, by name; ours first, then those of the literature."""

from sage_sched.best_effort.policy import Qllm
from sage_sched.policies.fastserve import FastServe
from sage_sched.policies.fcfs_fill import FcfsFill
from sage_sched.policies.ltr import Ltr
from sage_sched.policies.sage import Sage
from sage_sched.policies.srpt_oracle import SrptOracle
from sage_sched.policies.ssjf import Ssjf
from sage_sched.policies.trail_prompt import TrailPrompt
from sage_sched.policies.uniboost import UniBoost
from sage_sched.policy import Policy
from sage_sched.probe.policy import Trail
from sage_sched.slo.policy import Proserve
from sage_sched.urgency.policy import Urgency

POLICIES: dict[str, type[Policy]] = {
    "sage": Sage,
    "fcfs-fill": FcfsFill,
    "fastserve": FastServe,
    "ltr": Ltr,
    "proserve": Proserve,
    "qllm": Qllm,
    "srpt-oracle": SrptOracle,
    "ssjf": Ssjf,
    "trail": Trail,
    "trail-prompt": TrailPrompt,
    "uniboost": UniBoost,
    "urgency": Urgency,
}
