# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpush.router``."""

import typer

from kvpush.router.cli import router_command

if __name__ == "__main__":
    typer.run(router_command)
