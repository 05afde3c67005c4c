#!/usr/bin/env python3
"""Writes a C table of calls: every function of every public header, once per pointer argument, which is NULL
while the others are good. null_calls.c makes them.
usage: null_calls.py ROOT TARGET"""
import glob
import re
import sys

# Arguments that may be NULL, next to err, context and opts. A call with one of them must not crash.
MAY_BE_NULL = {
    "fsdp_async_save_wait": ["report_out"],
    "fsdp_checkpoint_check": ["watch"],
    "fsdp_checkpoint_diff": ["summary_out"],
    "fsdp_checkpoint_missing_at": ["size_out"],
    "fsdp_checkpoint_resolve": ["watch", "access"],
    "fsdp_checkpoint_verify": ["summary_out"],
    "fsdp_checkpoint_verify_like": ["summary_out"],
    "fsdp_filter_create": ["include", "exclude"],
    "fsdp_mesh_create": ["ranks"],
    "fsdp_model_add": ["param_out"],
    "fsdp_path_is_run": ["access"],
    "fsdp_root_clip_grad_norm": ["norm_out"],
    "fsdp_root_finalize_backward": ["handle_out"],
    "fsdp_root_set_state": ["report"],
    "fsdp_run_latest": ["watch", "access"],
    "fsdp_run_list": ["access"],
    "fsdp_run_retain": ["policy"],
    "fsdp_scaler_step": ["skipped_out"],
    "fsdp_unit_create": ["unit_out"],
    "fsdp_unit_create_list": ["unit_out"],
    "fsdp_unit_set_custom_collective": ["custom"],
    "fsdp_unit_unshard": ["handle_out"],
    "fsdp_value_set_bytes": ["data"],
    "fsdp_wrap_summon_full_params": ["unit"],
}
VARIADIC = "..."

CALLBACKS = ["fsdp_all_reduce_hook", "fsdp_file_digest_visit", "fsdp_grad_hook", "fsdp_param_fill",
             "fsdp_rank_body", "fsdp_rank_main", "fsdp_slab_visit", "fsdp_wrap_comm_hook"]
# Members of struct good (null_calls.c).
OBJECTS = ["async_saver", "checkpoint", "comm", "comm_handle", "conversion", "ctl", "entry", "filter",
           "finalize_handle", "mesh", "model", "optim", "param", "root", "scaler", "sd", "unit",
           "unshard_handle", "world", "wrap"]
NUMBERS = {"ndim": "1", "n": "1", "count": "1", "parts": "1", "size": "1", "name_size": "1",
           "target_size": "1", "value": "1", "memory": "1 << 20", "dtype": "FSDP_F32", "to_type": "FSDP_F32",
           "from_type": "FSDP_F32", "kind": "FSDP_ALL_GATHER", "lr": "1", "factor": "1"}


def split(text):
    """Arguments: (type, name)."""
    if text.strip() in ("", "void"):
        return []
    arguments = []
    for one in text.split(","):
        one = one.strip()
        match = re.match(r"^(.*?)(\w+)(\[\w*\])?$", one)
        if one == VARIADIC:
            arguments.append((VARIADIC, VARIADIC))
        else:
            arguments.append((match[1].strip() + (" *" if match[3] else ""), match[2]))
    return arguments


def functions(root):
    headers = sorted(h for h in glob.glob(f"{root}/*/*.h") if "FSDP_API" in open(h).read())
    for header in headers:
        text = re.sub(r"/\*.*?\*/", "", open(header).read(), flags=re.S)
        if "/ctl_mpi.h" in header:    # another library
            continue
        for match in re.finditer(r"FSDP_API\s+(?:FSDP_CHECKED\s+)?([^;{}#]*?)\b(fsdp_\w+)\s*\(([^;]*?)\)"
                                 r"\s*(?:FSDP_PRINTF\([^)]*\))?\s*;", text):
            if "/kernels/" not in header:
                yield " ".join(match[1].split()), match[2], split(" ".join(match[3].split()))


def is_pointer(type_name):
    return type_name.endswith(("*", "*const")) or type_name in CALLBACKS


def value(type_name, name):
    """An argument that is good enough to come after a check of another one."""
    base = type_name.replace("const ", "").replace("struct ", "").strip()
    if type_name in CALLBACKS:
        return f"good_{type_name[5:]}"
    if base == "fsdp_error *":
        return "why" if name == "err" else "&(fsdp_error){0}"
    if base == "char *":
        return '(char[]){"x"}' if "const" not in type_name else '"x"'
    if "const char *const *" in type_name:
        return '(const char *[]){"x"}'
    for item in OBJECTS:
        if base == f"fsdp_{item} *":
            return f"good->{item}"
        if base == f"fsdp_{item} **":
            return f"&(fsdp_{item} *){{good->{item}}}"
    if base.startswith("fsdp_unit *const *"):
        return "&good->unit"
    if base == "void *":
        return "good->bytes"
    if base == "char **":
        return "&(char *){NULL}"
    if base.endswith("**"):
        return f"&({base[:-1]}){{NULL}}"
    if base == "fsdp_param_spec *":
        return "good_param_spec(good)"
    if base.endswith("*"):
        item = base[:-1].strip()
        is_number = item in ("int", "int64_t", "double", "bool", "size_t")
        return "good->bytes" if is_number or item == "fsdp_optim_tensor" else f"&({item}){{0}}"
    if base in ("int", "int64_t", "size_t", "uint64_t", "double", "bool", "int32_t"):
        return NUMBERS.get(name, "0")
    if base in ("fsdp_dtype", "fsdp_collective_kind"):
        return NUMBERS[name]
    return f"({base}){{0}}"


def is_refused(returned, function, name):
    """FSDP_ERR_USAGE, with the name of the argument."""
    return returned == "fsdp_status" and name not in ("err", "context", "opts") and \
        name not in MAY_BE_NULL.get(function, []) and not function.startswith("fsdp_fail")


def emit(root):
    rows = []
    print('#include "tests/nulls/null_calls.h"')
    for returned, function, arguments in functions(root):
        for position, (type_name, name) in enumerate(arguments):
            if not is_pointer(type_name):
                continue
            values = ["NULL" if i == position else value(*argument)
                      for i, argument in enumerate(arguments) if argument[0] != VARIADIC]
            call = f"{function}({', '.join(values)})"
            kind = "status" if returned == "fsdp_status" else "none"
            caller = f"call_{len(rows)}"
            body = f"return {call};" if kind == "status" else f"(void){call};\n    return FSDP_OK;"
            print(f"static fsdp_status {caller}(good_arguments *good, fsdp_error *why)\n{{\n"
                  f"    (void)good, (void)why;\n    {body}\n}}")
            refused = str(is_refused(returned, function, name)).lower()
            rows.append(f'    {{"{function}", "{name}", {refused}, {caller}}},')
    print("const null_call null_calls[] = {")
    print("\n".join(rows))
    print("};\nconst size_t null_call_count = sizeof null_calls / sizeof *null_calls;")


if __name__ == "__main__":
    sys.stdout = open(sys.argv[2], "w")
    emit(sys.argv[1])
