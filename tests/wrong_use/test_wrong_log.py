"""Wrong flags of the log, signals and evaluations."""
import pytest

from megashard import USAGE
from wrong_use import MOCK, PRETRAIN, RATE, check

RUN = [*PRETRAIN, *RATE, *MOCK]
CASES = {
    "a level that there is not": ([*RUN, "--timing-log-level", "3"], USAGE,
                                  '--timing-log-level takes one of 0, 1, 2, got "3"'),
    "times by another rule": ([*RUN, "--timing-log-option", "mean"], USAGE,
                              "--timing-log-option takes one of max, minmax, all"),
    "a signal that nobody can handle": ([*RUN, "--exit-signal", "SIGKILL"], USAGE,
                                        "--exit-signal takes one of SIGTERM, SIGINT"),
    "a signal by its number": ([*RUN, "--exit-signal", "15"], USAGE, "--exit-signal takes one of SIGTERM, SIGINT"),
    "a value for a switch": ([*RUN, "--log-memory=much"], USAGE, "--log-memory"),
    "no step between log lines": ([*RUN, "--log-interval", "0"], USAGE, "--log-interval"),
    "metrics into a folder": ([*RUN, "--metrics-file", "{folder}"], USAGE, "cannot be written"),
    "no step between evaluations": ([*RUN, "--eval-interval", "0"], USAGE, "--eval-interval"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(folder, name):
    check(CASES[name], folder=folder)
