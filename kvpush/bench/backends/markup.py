# SPDX-License-Identifier: Apache-2.0
"""Text of others in a page of ours."""

from __future__ import annotations

import html
import re

__all__ = ["escaped"]

_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(text: str) -> str:
    """As the content of an element, or of an attribute in double quotes. What may not be in a page at all becomes U+FFFD."""
    return html.escape(_NOT_IN_XML.sub("\ufffd", text))
