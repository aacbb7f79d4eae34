# SPDX-License-Identifier: Apache-2.0
"""`kvpush chaos`: real vLLM instances under load while they are killed, frozen and cut off; every answer is checked."""
