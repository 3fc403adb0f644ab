"""Whether another package has taken the place of one of ours.

`patches` is a name that a user's own package may have too. If a server is started
beside such a package, SGLang finds no plugin and says only that it does not know the policy.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

logger = logging.getLogger(__name__)

_ROOT = __file__.rpartition("sage_sched")[0]


def warn() -> None:
    """Entry point of the group sglang.srt.plugins: say which package is in the way, and what to
    do. It is here, and not in `patches`, as that may be the one."""
    for name in ("patches", "predictor_store"):
        found = find_spec(name)
        origin = str(found.origin) if found is not None else "nowhere"
        if not origin.startswith(_ROOT):
            logger.error(
                "sage-sched: the package %r is found in %s, and not in %s, so its policies are not "
                "available. Start the server from another directory, or by `python -P -m ...`, "
                "which does not look for packages in the present one.",
                name, origin, _ROOT,
            )  # fmt: skip
