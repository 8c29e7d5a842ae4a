"""How long threads of one process wait for each other awake before they sleep.

OpenMP's threads meet after every product. By default they wait spinning, for milliseconds: where another process has
one of two cores, the threads that run burn the time that the waited-for one needs, and a run becomes 3 to 20 times
slower. A thousand turns (GNU's OpenMP, which PyTorch's wheels carry) or a millisecond (Intel's) cost nothing on an idle
machine; with one core of two taken, passes then take about twice as long, as they must.
"""

from __future__ import annotations

import os

WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def wait_briefly() -> None:
    """Sets both for this process and those it starts, unless the environment says anything about waiting already.

    An OpenMP runtime reads them once, as it is loaded: call it before PyTorch is imported.
    """
    if not {"OMP_WAIT_POLICY", *WAITING} & os.environ.keys():
        os.environ.update(WAITING)
