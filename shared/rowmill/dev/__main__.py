"""``python -m rowmill.dev [COMMAND=PACKAGE ...]`` installs what private servers need, and each PACKAGE whose COMMAND is not there.

For `make`, whose tests start servers of their own. Exit status 2 when something must be installed and we may not.
"""

from __future__ import annotations

import shutil
import sys

from rowmill.dev.install import install_packages, missing_packages
from rowmill.errors import RowmillError


def main(also: list[str]) -> int:
    wanted = dict(pair.split("=", 1) for pair in also)
    packages = missing_packages() + [package for command, package in wanted.items() if shutil.which(command) is None]
    if not packages:
        return 0
    try:
        install_packages(packages, report=_say)
    except RowmillError as error:
        _say(str(error))
        return 2
    return 0


def _say(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201 - a command's own output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
