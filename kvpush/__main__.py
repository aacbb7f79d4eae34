# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpush``."""

from kvpush.cli import app

if __name__ == "__main__":
    app(prog_name="kvpush")
