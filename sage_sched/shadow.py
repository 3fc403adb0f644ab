"""Whether another package has taken the place of one of ours.

`patches` is a name that a user's own package may have too. If a server is started
beside such a package, SGLang finds no plugin and says only that it does not know the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec

logger = logging.getLogger(__name__)

_ROOT = __file__.rpartition("sage_sched")[0]
_OF_A_SERVER = ("patches", "predictor_store")
OURS = (*_OF_A_SERVER, "bench")


def displaced(names: Iterable[str] = OURS) -> dict[str, str]:
    """Those of our packages that are not found where ours are, and where they are found."""
    found = {}
    for name in names:
        spec = find_spec(name)
        origin = str(spec.origin) if spec is not None else "nowhere"
        if not origin.startswith(_ROOT):
            found[name] = origin
    return found


def what_is_in_the_way(name: str, origin: str) -> str:
    """For people."""
    return f"the package {name!r} is found in {origin}, and not in {_ROOT}"


def warn() -> None:
    """Entry point of the group sglang.srt.plugins: say which package is in the way, and what to
    do. It is here, and not in `patches`, as that may be the one."""
    for name, origin in displaced(_OF_A_SERVER).items():
        logger.error(
            "sage-sched: %s, so its policies are not available. Start the server from another "
            "directory, or by `python -P -m ...`, which does not look for packages in the present "
            "one.",
            what_is_in_the_way(name, origin),
        )
