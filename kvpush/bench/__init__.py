# SPDX-License-Identifier: Apache-2.0
"""`kvpush bench`: what a transfer costs a request, connector beside connector, on the loopback or on a shaped link."""
