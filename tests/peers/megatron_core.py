"""Megatron-Core and fsdp-convert read what the other one writes: see megatron_core_cases.py.

usage: megatron_core.py FSDP_CONVERT [CASE...]

Megatron-Core starts processes that import this file again, so that it imports nothing itself.
"""

if __name__ == "__main__":
    from maps_common import run_cases
    from megatron_core_cases import CASES

    run_cases(CASES)
