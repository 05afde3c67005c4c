"""The C interface of fsdp 0.1.0: made by bind.py from its public headers; not edited by hand."""

from ctypes import (CFUNCTYPE, POINTER, Structure, Union, c_bool, c_char, c_char_p, c_double, c_float, c_int, c_int8,
                    c_int16, c_int32, c_int64, c_size_t, c_uint, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p)

VERSION = "0.1.0"


class Enum(c_int):
    """A number of a C enum; words has the numbers by their names in lower case, without the common prefix."""

    words = {}

    @property
    def word(self):
        return next((word for word, number in self.words.items() if number == self.value), str(self.value))

    def __repr__(self):
        return self.word


class fsdp_access(Structure):
    pass


class fsdp_adamw_opts(Structure):
    pass


class fsdp_async_opts(Structure):
    pass


class fsdp_async_report(Structure):
    pass


class fsdp_box(Structure):
    pass


class fsdp_box_copy(Structure):
    pass


class fsdp_caps(Structure):
    pass


class fsdp_cast_report(Structure):
    pass


class fsdp_checkpoint_file(Structure):
    pass


class fsdp_checkpoint_info(Structure):
    pass


class fsdp_clip_opts(Structure):
    pass


class fsdp_collective(Structure):
    pass


class fsdp_comm_view(Structure):
    pass


class fsdp_connect_opts(Structure):
    pass


class fsdp_convert_note(Structure):
    pass


class fsdp_convert_option(Structure):
    pass


class fsdp_convert_opts(Structure):
    pass


class fsdp_convert_plan(Structure):
    pass


class fsdp_custom_collective(Structure):
    pass


class fsdp_diff_item(Structure):
    pass


class fsdp_diff_opts(Structure):
    pass


class fsdp_diff_summary(Structure):
    pass


class fsdp_dtype_info(Structure):
    pass


class fsdp_entry(Structure):
    pass


class fsdp_error(Structure):
    pass


class fsdp_extension(Structure):
    pass


class fsdp_finding(Structure):
    pass


class fsdp_flat_buffer(Structure):
    pass


class fsdp_flat_part(Structure):
    pass


class fsdp_format(Structure):
    pass


class fsdp_layout(Structure):
    pass


class fsdp_like_summary(Structure):
    pass


class fsdp_load_opts(Structure):
    pass


class fsdp_load_report(Structure):
    pass


class fsdp_map_opts(Structure):
    pass


class fsdp_memory(Structure):
    pass


class fsdp_note_item(Structure):
    pass


class fsdp_open_opts(Structure):
    pass


class fsdp_optim_group(Structure):
    pass


class fsdp_optim_tensor(Structure):
    pass


class fsdp_param_info(Structure):
    pass


class fsdp_param_place(Structure):
    pass


class fsdp_param_spec(Structure):
    pass


class fsdp_placement(Structure):
    pass


class fsdp_rank_box(Structure):
    pass


class fsdp_rect(Structure):
    pass


class fsdp_retain_action(Structure):
    pass


class fsdp_retain_opts(Structure):
    pass


class fsdp_retention(Structure):
    pass


class fsdp_root_load_opts(Structure):
    pass


class fsdp_root_save_opts(Structure):
    pass


class fsdp_run_step(Structure):
    pass


class fsdp_run_steps(Structure):
    pass


class fsdp_save_opts(Structure):
    pass


class fsdp_scaler_opts(Structure):
    pass


class fsdp_schedule(Structure):
    pass


class fsdp_select_opts(Structure):
    pass


class fsdp_sgd_opts(Structure):
    pass


class fsdp_state_opts(Structure):
    pass


class fsdp_stats(Structure):
    pass


class fsdp_tensor(Structure):
    pass


class fsdp_unit_opts(Structure):
    pass


class fsdp_value(Structure):
    pass


class fsdp_verify_opts(Structure):
    pass


class fsdp_verify_summary(Structure):
    pass


class fsdp_watch(Structure):
    pass


class fsdp_wrap_bucket(Structure):
    pass


class fsdp_wrap_module(Structure):
    pass


class fsdp_wrap_optim_input(Structure):
    pass


class fsdp_wrap_opts(Structure):
    pass


class fsdp_wrap_place(Structure):
    pass


class fsdp_wrap_policy(Structure):
    pass


class fsdp_wrap_summon_opts(Structure):
    pass


class fsdp_wrap_unit_opts(Structure):
    pass


class fsdp_status(Enum):
    words = {"ok": 0, "differs": 1, "err_usage": 2, "err_not_found": 3, "err_damaged": 4, "err_refused": 5, "err_exists": 6, "err_no_space": 7, "err_io": 8, "err_limit": 9, "err_peer": 10, "err_internal": 70, "err_cancelled": 75}

FSDP_OK = 0
FSDP_DIFFERS = 1
FSDP_ERR_USAGE = 2
FSDP_ERR_NOT_FOUND = 3
FSDP_ERR_DAMAGED = 4
FSDP_ERR_REFUSED = 5
FSDP_ERR_EXISTS = 6
FSDP_ERR_NO_SPACE = 7
FSDP_ERR_IO = 8
FSDP_ERR_LIMIT = 9
FSDP_ERR_PEER = 10
FSDP_ERR_INTERNAL = 70
FSDP_ERR_CANCELLED = 75
FSDP_ERROR_TEXT = 1000
fsdp_error._fields_ = [
    ("status", fsdp_status),
    ("rank", c_int),
    ("errnum", c_int),
    ("text", c_char * 1000)]
class fsdp_dtype(Enum):
    words = {"dtype_none": 0, "f64": 1, "f32": 2, "f16": 3, "bf16": 4, "f8_e4m3fn": 5, "f8_e5m2": 6, "f8_e4m3fnuz": 7, "f8_e5m2fnuz": 8, "f8_e8m0fnu": 9, "f4_e2m1fn_x2": 10, "f6_e2m3": 11, "f6_e3m2": 12, "i64": 13, "i32": 14, "i16": 15, "i8": 16, "u64": 17, "u32": 18, "u16": 19, "u8": 20, "bool": 21, "c64": 22, "c128": 23, "complex32": 24, "bcomplex32": 25, "q4_0": 26, "q4_1": 27, "q5_0": 28, "q5_1": 29, "q8_0": 30, "q2_k": 31, "q3_k": 32, "q4_k": 33, "q5_k": 34, "q6_k": 35, "dtype_count": 36}

FSDP_DTYPE_NONE = 0
FSDP_F64 = 1
FSDP_F32 = 2
FSDP_F16 = 3
FSDP_BF16 = 4
FSDP_F8_E4M3FN = 5
FSDP_F8_E5M2 = 6
FSDP_F8_E4M3FNUZ = 7
FSDP_F8_E5M2FNUZ = 8
FSDP_F8_E8M0FNU = 9
FSDP_F4_E2M1FN_X2 = 10
FSDP_F6_E2M3 = 11
FSDP_F6_E3M2 = 12
FSDP_I64 = 13
FSDP_I32 = 14
FSDP_I16 = 15
FSDP_I8 = 16
FSDP_U64 = 17
FSDP_U32 = 18
FSDP_U16 = 19
FSDP_U8 = 20
FSDP_BOOL = 21
FSDP_C64 = 22
FSDP_C128 = 23
FSDP_COMPLEX32 = 24
FSDP_BCOMPLEX32 = 25
FSDP_Q4_0 = 26
FSDP_Q4_1 = 27
FSDP_Q5_0 = 28
FSDP_Q5_1 = 29
FSDP_Q8_0 = 30
FSDP_Q2_K = 31
FSDP_Q3_K = 32
FSDP_Q4_K = 33
FSDP_Q5_K = 34
FSDP_Q6_K = 35
FSDP_DTYPE_COUNT = 36
class fsdp_on_overflow(Enum):
    words = {"fail": 0, "clamp": 1, "inf": 2}

FSDP_OVERFLOW_FAIL = 0
FSDP_OVERFLOW_CLAMP = 1
FSDP_OVERFLOW_INF = 2
fsdp_dtype_info._fields_ = [
    ("dtype", fsdp_dtype),
    ("size", c_size_t),
    ("values", c_size_t),
    ("is_float", c_bool),
    ("name", c_char_p),
    ("torch", c_char_p),
    ("torch_storage", c_char_p),
    ("safetensors", c_char_p),
    ("numpy", c_char_p)]
FSDP_MAX_DIMS = 64
fsdp_box._fields_ = [
    ("ndim", c_int),
    ("lo", c_int64 * 64),
    ("len", c_int64 * 64)]
FSDP_STATS_BINS = 16
FSDP_STATS_LOWEST = -40
FSDP_STATS_STEP = 4
fsdp_stats._fields_ = [
    ("finite", c_int64),
    ("nans", c_int64),
    ("infinities", c_int64),
    ("zeros", c_int64),
    ("min", c_double),
    ("max", c_double),
    ("sum", c_double),
    ("magnitudes", c_int64 * 16)]
fsdp_rect._fields_ = [
    ("to", c_void_p),
    ("from", c_void_p),
    ("to_type", fsdp_dtype),
    ("from_type", fsdp_dtype),
    ("rows", c_int64),
    ("width", c_int64),
    ("to_pitch", c_int64),
    ("from_pitch", c_int64)]
fsdp_caps._fields_ = [
    ("values", c_bool),
    ("opaque", c_bool),
    ("classes", c_bool),
    ("aliases", c_bool),
    ("shares", c_bool),
    ("metadata", c_bool),
    ("nameless", c_bool),
    ("tuples", c_bool),
    ("lists_tuples", c_bool),
    ("regroups", c_bool),
    ("takes_under", c_bool),
    ("model_only", c_bool),
    ("model_part", c_bool),
    ("for_loaders", c_bool),
    ("plain_names", c_bool),
    ("maps_names", c_bool),
    ("notes_ties", c_bool),
    ("all_names", c_bool),
    ("names_groups", c_bool),
    ("nests_groups", c_bool),
    ("forms_groups", c_bool),
    ("f32_vectors", c_bool),
    ("f32_weights", c_bool),
    ("takes_config", c_bool),
    ("needs_config", c_bool),
    ("checks_config", c_bool),
    ("copies_files", c_bool),
    ("adds_objects", c_bool),
    ("sharded", c_bool),
    ("has_kinds", c_bool),
    ("compresses", c_bool),
    ("splits_files", c_bool),
    ("patterns", c_bool),
    ("only_model", c_bool),
    ("only_tensors", c_bool),
    ("notes_aliases", c_bool),
    ("repeats", c_bool),
    ("numbered", c_bool),
    ("keeps_order", c_bool),
    ("takes_model", c_bool),
    ("takes_void", c_bool),
    ("whole_chunks", c_bool),
    ("without_config", c_bool)]
fsdp_format._fields_ = [
    ("name", c_char_p),
    ("alias", c_char_p),
    ("suffixes", c_char_p * 4),
    ("base", c_char_p),
    ("makes", c_char_p),
    ("reads_file", c_bool),
    ("reads_directory", c_bool),
    ("writes_file", c_bool),
    ("writes_directory", c_bool),
    ("caps", fsdp_caps),
    ("reader", c_void_p),
    ("writer", c_void_p)]
FSDP_MAX_MESH_DIMS = 4
FSDP_MAX_MESH_NAME = 31
class fsdp_placement_kind(Enum):
    words = {"replicate": 0, "shard": 1, "strided_shard": 2, "partial": 3}

FSDP_REPLICATE = 0
FSDP_SHARD = 1
FSDP_STRIDED_SHARD = 2
FSDP_PARTIAL = 3
fsdp_placement._fields_ = [
    ("kind", fsdp_placement_kind),
    ("dim", c_int),
    ("split", c_int64)]
fsdp_rank_box._fields_ = [
    ("rank", c_int),
    ("box", fsdp_box)]
fsdp_box_copy._fields_ = [
    ("copies", c_int),
    ("copy", c_int)]
FSDP_MAX_LAYOUT_BOXES = 65536
fsdp_flat_part._fields_ = [
    ("name", c_char_p),
    ("name_size", c_size_t),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("offset", c_int64)]
class fsdp_layout_kind(Enum):
    words = {"mesh": 0, "boxes": 1, "flat": 2}

FSDP_LAYOUT_MESH = 0
FSDP_LAYOUT_BOXES = 1
FSDP_LAYOUT_FLAT = 2
fsdp_layout._fields_ = [
    ("kind", fsdp_layout_kind),
    ("mesh", c_void_p),
    ("placement", fsdp_placement * 4),
    ("boxes", POINTER(fsdp_rank_box)),
    ("box_count", c_size_t),
    ("copies", POINTER(fsdp_box_copy)),
    ("flat_count", c_int64),
    ("flat_offset", c_int64)]
class fsdp_value_kind(Enum):
    words = {"null": 0, "bool": 1, "i64": 2, "u64": 3, "f64": 4, "string": 5, "bytes": 6, "list": 7, "dict": 8, "opaque": 9, "integer": 10, "complex": 11, "class": 12, "tensor": 13}

FSDP_VALUE_NULL = 0
FSDP_VALUE_BOOL = 1
FSDP_VALUE_I64 = 2
FSDP_VALUE_U64 = 3
FSDP_VALUE_F64 = 4
FSDP_VALUE_STRING = 5
FSDP_VALUE_BYTES = 6
FSDP_VALUE_LIST = 7
FSDP_VALUE_DICT = 8
FSDP_VALUE_OPAQUE = 9
FSDP_VALUE_INTEGER = 10
FSDP_VALUE_COMPLEX = 11
FSDP_VALUE_CLASS = 12
FSDP_VALUE_TENSOR = 13
class fsdp_value_100_100(Structure):
    _fields_ = [("data", c_char_p), ("size", c_size_t)]

class fsdp_value_100_101(Structure):
    _fields_ = [("items", POINTER(fsdp_value)), ("count", c_size_t)]

class fsdp_value_100(Union):
    _fields_ = [("boolean", c_bool), ("i64", c_int64), ("u64", c_uint64), ("f64", c_double), ("complex_parts", c_double * 2), ("tensor", c_uint64), ("bytes", fsdp_value_100_100), ("list", fsdp_value_100_101)]

fsdp_value._fields_ = [
    ("kind", fsdp_value_kind),
    ("is_tuple", c_bool),
    ("as", fsdp_value_100)]
FSDP_VALUE_DEPTH = 1024
FSDP_PATH_NUMBER = 1073741824
FSDP_PATH_TUPLE = 536870912
FSDP_PATH_WHOLE = -2147483648
FSDP_PATH_DEFAULT_MOST = 4
FSDP_MAX_NAME = 65535
class fsdp_entry_kind(Enum):
    words = {"tensor": 0, "value": 1, "alias": 2}

FSDP_ENTRY_TENSOR = 0
FSDP_ENTRY_VALUE = 1
FSDP_ENTRY_ALIAS = 2
fsdp_entry._fields_ = [
    ("kind", fsdp_entry_kind),
    ("name", c_char_p),
    ("name_size", c_size_t),
    ("path", POINTER(c_int32)),
    ("path_count", c_size_t),
    ("dtype", fsdp_dtype),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("layout", fsdp_layout),
    ("data", c_void_p),
    ("flat", c_int),
    ("value", fsdp_value),
    ("target", c_size_t)]
fsdp_tensor._fields_ = [
    ("dtype", fsdp_dtype),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("layout", fsdp_layout),
    ("data", c_void_p)]
fsdp_flat_buffer._fields_ = [
    ("dtype", fsdp_dtype),
    ("mesh", c_void_p),
    ("rank", c_int),
    ("count", c_int64),
    ("parts", POINTER(fsdp_flat_part)),
    ("part_count", c_size_t),
    ("data", c_void_p)]
FSDP_CTL_DEADLINE_MS = 300000
fsdp_rank_body = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(fsdp_error))
class fsdp_kind(Enum):
    words = {"sharded": 0, "full": 1, "local": 2}

FSDP_SHARDED = 0
FSDP_FULL = 1
FSDP_LOCAL = 2
class fsdp_owner_policy(Enum):
    words = {"balanced": 0, "lowest": 1}

FSDP_OWNERS_BALANCED = 0
FSDP_OWNERS_LOWEST = 1
fsdp_watch._fields_ = [
    ("context", c_void_p),
    ("progress", CFUNCTYPE(c_int, c_void_p, c_int64, c_int64, c_char_p)),
    ("notice", CFUNCTYPE(None, c_void_p, c_char_p)),
    ("stopped", CFUNCTYPE(c_bool, c_void_p))]
fsdp_access._fields_ = [
    ("follow_links", c_bool),
    ("limits_only", c_bool),
    ("disk", c_void_p)]
FSDP_NO_STEP = -1
fsdp_retention._fields_ = [
    ("keep_last", c_int),
    ("keep_every", c_int64),
    ("pins", POINTER(c_int64)),
    ("pin_count", c_size_t)]
fsdp_save_opts._fields_ = [
    ("kind", fsdp_kind),
    ("owners", fsdp_owner_policy),
    ("compress", c_bool),
    ("level", c_int),
    ("skip_fsync", c_bool),
    ("skip_view", c_bool),
    ("rank0_writes", c_bool),
    ("overwrite", c_bool),
    ("threads", c_int),
    ("memory", c_int64),
    ("step", POINTER(c_int64)),
    ("run", c_uint8 * 16),
    ("retain", POINTER(fsdp_retention)),
    ("watch", fsdp_watch),
    ("access", fsdp_access)]
class fsdp_check_mode(Enum):
    words = {"blocks": 0, "off": 1}

FSDP_CHECK_BLOCKS = 0
FSDP_CHECK_OFF = 1
fsdp_load_report._fields_ = [
    ("missing", POINTER(c_char_p)),
    ("missing_count", c_size_t),
    ("unexpected", POINTER(c_char_p)),
    ("unexpected_count", c_size_t),
    ("path", c_char_p),
    ("bytes_read", c_int64),
    ("bytes_needed", c_int64)]
fsdp_load_opts._fields_ = [
    ("check", fsdp_check_mode),
    ("partial", c_bool),
    ("cast", c_bool),
    ("include", c_char_p),
    ("exclude", c_char_p),
    ("threads", c_int),
    ("memory", c_int64),
    ("report", POINTER(fsdp_load_report)),
    ("watch", fsdp_watch),
    ("access", fsdp_access)]
fsdp_slab_visit = CFUNCTYPE(c_int, c_void_p, POINTER(fsdp_entry), c_int64, c_int64, c_void_p, POINTER(fsdp_error))
fsdp_checkpoint_info._fields_ = [
    ("path", c_char_p),
    ("format", c_char_p),
    ("format_major", c_int),
    ("format_minor", c_int),
    ("kind", fsdp_kind),
    ("step", c_int64),
    ("run", c_uint8 * 16),
    ("world", c_int),
    ("compressed", c_bool),
    ("file_count", c_int),
    ("file_bytes", c_int64),
    ("tensor_bytes", c_int64)]
fsdp_checkpoint_file._fields_ = [
    ("name", c_char * 256),
    ("size", c_int64),
    ("box_count", c_int64),
    ("block_count", c_int64)]
fsdp_open_opts._fields_ = [
    ("format", c_char_p),
    ("allow_missing", c_char_p),
    ("variant", c_char_p),
    ("void_as", c_char_p),
    ("like", c_char_p),
    ("as_stored", c_bool),
    ("whole", c_bool),
    ("memory", c_int64),
    ("watch", POINTER(fsdp_watch)),
    ("access", fsdp_access)]
class fsdp_verify_level(Enum):
    words = {"quick": 0, "data": 1, "deep": 2}

FSDP_VERIFY_QUICK = 0
FSDP_VERIFY_DATA = 1
FSDP_VERIFY_DEEP = 2
class fsdp_finding_kind(Enum):
    words = {"damage": 0, "value": 1, "fixed": 2, "code": 3, "missing": 4, "extra": 5, "shape": 6, "not_finite": 7, "zero": 8, "twin": 9, "unchanged": 10}

FSDP_FINDING_DAMAGE = 0
FSDP_FINDING_VALUE = 1
FSDP_FINDING_FIXED = 2
FSDP_FINDING_CODE = 3
FSDP_FINDING_MISSING = 4
FSDP_FINDING_EXTRA = 5
FSDP_FINDING_SHAPE = 6
FSDP_FINDING_NOT_FINITE = 7
FSDP_FINDING_ZERO = 8
FSDP_FINDING_TWIN = 9
FSDP_FINDING_UNCHANGED = 10
fsdp_finding._fields_ = [
    ("file", c_char_p),
    ("tensor", c_char_p),
    ("block", c_int64),
    ("text", c_char_p),
    ("unreadable", c_bool),
    ("kind", fsdp_finding_kind)]
class fsdp_digests(Enum):
    words = {"ignore": 0, "use": 1, "write": 2}

FSDP_DIGESTS_IGNORE = 0
FSDP_DIGESTS_USE = 1
FSDP_DIGESTS_WRITE = 2
fsdp_verify_opts._fields_ = [
    ("level", fsdp_verify_level),
    ("digests", fsdp_digests),
    ("repair", c_bool),
    ("variant", c_char_p),
    ("threads", c_int),
    ("memory", c_int64),
    ("finding", CFUNCTYPE(None, c_void_p, POINTER(fsdp_finding))),
    ("finding_context", c_void_p),
    ("watch", fsdp_watch),
    ("access", fsdp_access)]
fsdp_verify_summary._fields_ = [
    ("files", c_int64),
    ("tensors", c_int64),
    ("blocks", c_int64),
    ("bytes", c_int64),
    ("checked_bytes", c_int64),
    ("findings", c_int64),
    ("unreadable", c_int64),
    ("warnings", c_int64),
    ("fixed", c_int64),
    ("code_files", c_int64),
    ("digest_files", c_int64),
    ("digests_written", c_bool)]
fsdp_like_summary._fields_ = [
    ("model", c_char * 128),
    ("expected", c_int64),
    ("found", c_int64),
    ("findings", c_int64)]
class fsdp_step_state(Enum):
    words = {"good": 0, "broken": 1, "staging": 2, "deleting": 3, "newer": 4, "replaced": 5}

FSDP_STEP_GOOD = 0
FSDP_STEP_BROKEN = 1
FSDP_STEP_STAGING = 2
FSDP_STEP_DELETING = 3
FSDP_STEP_NEWER = 4
FSDP_STEP_REPLACED = 5
fsdp_run_step._fields_ = [
    ("step", c_int64),
    ("name", c_char_p),
    ("state", fsdp_step_state),
    ("pinned", c_bool),
    ("at_work", c_bool),
    ("reason", c_char_p)]
fsdp_run_steps._fields_ = [
    ("items", POINTER(fsdp_run_step)),
    ("count", c_size_t)]
fsdp_retain_action._fields_ = [
    ("name", c_char_p),
    ("remove", c_bool),
    ("reason", c_char_p)]
fsdp_retain_opts._fields_ = [
    ("apply", c_bool),
    ("report", CFUNCTYPE(None, c_void_p, POINTER(fsdp_retain_action))),
    ("report_context", c_void_p),
    ("threads", c_int),
    ("memory", c_int64),
    ("watch", fsdp_watch),
    ("access", fsdp_access)]
class fsdp_only(Enum):
    words = {"default": 0, "all": 1, "model": 2, "optim": 3}

FSDP_ONLY_DEFAULT = 0
FSDP_ONLY_ALL = 1
FSDP_ONLY_MODEL = 2
FSDP_ONLY_OPTIM = 3
fsdp_select_opts._fields_ = [
    ("include", c_char_p),
    ("exclude", c_char_p),
    ("only", fsdp_only),
    ("part", c_char_p),
    ("keep_names", c_bool),
    ("drops", POINTER(c_char_p)),
    ("drop_count", c_size_t),
    ("renames", POINTER(c_char_p)),
    ("rename_count", c_size_t),
    ("under", c_char_p),
    ("dtype", c_char_p),
    ("dtype_rules", POINTER(c_char_p)),
    ("dtype_rule_count", c_size_t),
    ("on_overflow", fsdp_on_overflow)]
fsdp_cast_report._fields_ = [
    ("tensors", c_int64),
    ("overflows", c_int64),
    ("nans", c_int64),
    ("underflows", c_int64),
    ("max_rounding", c_double),
    ("max_underflow", c_double)]
class fsdp_tied(Enum):
    words = {"auto": 0, "keep": 1, "drop": 2}

FSDP_TIED_AUTO = 0
FSDP_TIED_KEEP = 1
FSDP_TIED_DROP = 2
class fsdp_optim_form(Enum):
    words = {"default": 0, "nested": 1, "flat": 2}

FSDP_OPTIM_FORM_DEFAULT = 0
FSDP_OPTIM_FORM_NESTED = 1
FSDP_OPTIM_FORM_FLAT = 2
class fsdp_opaque(Enum):
    words = {"refuse": 0, "copy": 1}

FSDP_OPAQUE_REFUSE = 0
FSDP_OPAQUE_COPY = 1
fsdp_convert_opts._fields_ = [
    ("format", c_char_p),
    ("open", fsdp_open_opts),
    ("max_shard_bytes", c_int64),
    ("kind", fsdp_kind),
    ("keep_full", c_bool),
    ("world", c_int),
    ("mesh", c_void_p),
    ("shard_dim", c_int),
    ("compress", c_bool),
    ("level", c_int),
    ("chunk_bytes", c_int64),
    ("skip_fsync", c_bool),
    ("skip_view", c_bool),
    ("skip_verify", c_bool),
    ("overwrite", c_bool),
    ("select", fsdp_select_opts),
    ("adapter", c_char_p),
    ("dequant", c_char_p),
    ("map", c_char_p),
    ("sizes", POINTER(c_char_p)),
    ("size_count", c_size_t),
    ("cast", POINTER(fsdp_cast_report)),
    ("copy_from", c_char_p),
    ("copy_code", c_bool),
    ("skip_copies", c_bool),
    ("tied", fsdp_tied),
    ("opaque", fsdp_opaque),
    ("optim_form", fsdp_optim_form),
    ("threads", c_int),
    ("memory", c_int64),
    ("resume", c_bool),
    ("bytes_per_second", c_int64),
    ("direct", c_bool),
    ("watch", fsdp_watch)]
class fsdp_note_kind(Enum):
    words = {"stage": 0, "mapped": 1, "unmapped": 2, "encoded": 3, "renamed": 4, "left_out": 5, "dropped": 6, "cast": 7, "code": 8, "tied": 9, "copied": 10, "model": 11, "extra": 12, "unread": 13, "missing": 14, "optim": 15, "numbered": 16, "tokenizer": 17, "rounded": 18, "tuples": 19, "config": 20, "metadata": 21, "directory": 22, "added": 23, "quantized": 24, "short": 25, "prefix": 26, "kinds": 27}

FSDP_NOTE_STAGE = 0
FSDP_NOTE_MAPPED = 1
FSDP_NOTE_UNMAPPED = 2
FSDP_NOTE_ENCODED = 3
FSDP_NOTE_RENAMED = 4
FSDP_NOTE_LEFT_OUT = 5
FSDP_NOTE_DROPPED = 6
FSDP_NOTE_CAST = 7
FSDP_NOTE_CODE = 8
FSDP_NOTE_TIED = 9
FSDP_NOTE_COPIED = 10
FSDP_NOTE_MODEL = 11
FSDP_NOTE_EXTRA = 12
FSDP_NOTE_UNREAD = 13
FSDP_NOTE_MISSING = 14
FSDP_NOTE_OPTIM = 15
FSDP_NOTE_NUMBERED = 16
FSDP_NOTE_TOKENIZER = 17
FSDP_NOTE_ROUNDED = 18
FSDP_NOTE_TUPLES = 19
FSDP_NOTE_CONFIG = 20
FSDP_NOTE_METADATA = 21
FSDP_NOTE_DIRECTORY = 22
FSDP_NOTE_ADDED = 23
FSDP_NOTE_QUANTIZED = 24
FSDP_NOTE_SHORT = 25
FSDP_NOTE_PREFIX = 26
FSDP_NOTE_KINDS = 27
class fsdp_note_level(Enum):
    words = {"line": 0, "said": 1, "in_short": 2}

FSDP_NOTE_LINE = 0
FSDP_NOTE_SAID = 1
FSDP_NOTE_IN_SHORT = 2
fsdp_note_item._fields_ = [
    ("name", c_char_p),
    ("other", c_char_p),
    ("name_size", c_size_t),
    ("other_size", c_size_t),
    ("number", c_int64)]
fsdp_convert_note._fields_ = [
    ("kind", fsdp_note_kind),
    ("level", fsdp_note_level),
    ("count", c_int64),
    ("items", POINTER(fsdp_note_item)),
    ("item_count", c_size_t),
    ("text", c_char_p)]
fsdp_convert_plan._fields_ = [
    ("source", c_void_p),
    ("sd", c_void_p),
    ("to", c_char_p),
    ("opts", POINTER(fsdp_convert_opts)),
    ("keeps_work", c_bool),
    ("may_overwrite", c_bool),
    ("files", c_int),
    ("world", c_int),
    ("tensors", c_int64),
    ("values", c_int64),
    ("aliases", c_int64),
    ("bytes_read", c_int64),
    ("bytes_written", c_int64),
    ("peak_memory", c_int64),
    ("free_bytes", c_int64),
    ("bytes_checked", c_int64),
    ("bytes_spooled", c_int64),
    ("bytes_needed", c_int64),
    ("model_missing", c_int64),
    ("notes", POINTER(fsdp_convert_note)),
    ("note_count", c_size_t),
    ("results", POINTER(fsdp_note_item)),
    ("result_count", c_size_t),
    ("memory", c_void_p)]
fsdp_file_digest_visit = CFUNCTYPE(None, c_void_p, c_char_p, POINTER(c_uint8))
fsdp_map_opts._fields_ = [
    ("map", c_char_p),
    ("sizes", POINTER(c_char_p)),
    ("size_count", c_size_t),
    ("other", c_char_p)]
class fsdp_option_kind(Enum):
    words = {"text": 0, "path": 1, "word": 2, "int": 3, "bytes": 4, "flag": 5, "list": 6, "mesh": 7}

FSDP_OPTION_TEXT = 0
FSDP_OPTION_PATH = 1
FSDP_OPTION_WORD = 2
FSDP_OPTION_INT = 3
FSDP_OPTION_BYTES = 4
FSDP_OPTION_FLAG = 5
FSDP_OPTION_LIST = 6
FSDP_OPTION_MESH = 7
class fsdp_option_group(Enum):
    words = {"source": 1, "taken": 2, "names": 3, "numbers": 4, "target": 5, "safety": 6, "running": 7}

FSDP_OPTIONS_SOURCE = 1
FSDP_OPTIONS_TAKEN = 2
FSDP_OPTIONS_NAMES = 3
FSDP_OPTIONS_NUMBERS = 4
FSDP_OPTIONS_TARGET = 5
FSDP_OPTIONS_SAFETY = 6
FSDP_OPTIONS_RUNNING = 7
fsdp_convert_option._fields_ = [
    ("name", c_char_p),
    ("member", c_char_p),
    ("kind", fsdp_option_kind),
    ("offset", c_size_t),
    ("count_offset", c_size_t),
    ("words", POINTER(c_char_p)),
    ("word_at", CFUNCTYPE(c_char_p, c_size_t)),
    ("first_word", c_int),
    ("takes_others", c_bool),
    ("least", c_int64),
    ("most", c_int64),
    ("is_optional", c_bool),
    ("is_negated", c_bool),
    ("group", fsdp_option_group),
    ("is_usual", c_bool),
    ("capability", c_size_t),
    ("or_map", c_bool),
    ("value", c_char_p),
    ("help", c_char_p)]
class fsdp_diff_state(Enum):
    words = {"equal": 0, "differs": 1, "only_a": 2, "only_b": 3}

FSDP_DIFF_EQUAL = 0
FSDP_DIFF_DIFFERS = 1
FSDP_DIFF_ONLY_A = 2
FSDP_DIFF_ONLY_B = 3
FSDP_DIFF_ELEMENT = 48
fsdp_diff_item._fields_ = [
    ("state", fsdp_diff_state),
    ("a", POINTER(fsdp_entry)),
    ("b", POINTER(fsdp_entry)),
    ("why", c_char_p),
    ("nesting", c_char_p * 2),
    ("elements", c_int64),
    ("differing", c_int64),
    ("at", c_int64 * 64),
    ("from", c_char * 48),
    ("to", c_char * 48),
    ("bits", c_int),
    ("max_abs", c_double),
    ("max_rel", c_double)]
fsdp_diff_summary._fields_ = [
    ("equal", c_int64),
    ("differ", c_int64),
    ("only_a", c_int64),
    ("only_b", c_int64),
    ("bytes", c_int64)]
fsdp_diff_opts._fields_ = [
    ("atol", c_double),
    ("rtol", c_double),
    ("ulp", c_int64),
    ("keys_only", c_bool),
    ("include", c_char_p),
    ("exclude", c_char_p),
    ("renames", POINTER(c_char_p)),
    ("rename_count", c_size_t),
    ("threads", c_int),
    ("memory", c_int64),
    ("visit", CFUNCTYPE(None, c_void_p, POINTER(fsdp_diff_item))),
    ("visit_context", c_void_p),
    ("watch", fsdp_watch)]
fsdp_connect_opts._fields_ = [
    ("rank", c_int),
    ("size", c_int),
    ("job", c_char_p),
    ("listener", c_int),
    ("host", c_char_p),
    ("port", c_int),
    ("deadline_ms", c_int)]
fsdp_rank_main = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, POINTER(c_char_p))
class fsdp_collective_kind(Enum):
    words = {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 3, "broadcast": 4, "all_to_all": 5}

FSDP_ALL_GATHER = 1
FSDP_REDUCE_SCATTER = 2
FSDP_ALL_REDUCE = 3
FSDP_BROADCAST = 4
FSDP_ALL_TO_ALL = 5
class fsdp_reduce_op(Enum):
    words = {"sum": 0, "avg": 1, "max": 2, "premul_sum": 3}

FSDP_REDUCE_SUM = 0
FSDP_REDUCE_AVG = 1
FSDP_REDUCE_MAX = 2
FSDP_REDUCE_PREMUL_SUM = 3
fsdp_comm_view._fields_ = [
    ("see", CFUNCTYPE(None, c_void_p, POINTER(c_void_p))),
    ("context", c_void_p)]
fsdp_collective._fields_ = [
    ("kind", fsdp_collective_kind),
    ("dtype", fsdp_dtype),
    ("in", c_void_p),
    ("out", c_void_p),
    ("count", c_int64),
    ("counts", POINTER(c_int64)),
    ("out_counts", POINTER(c_int64)),
    ("op", fsdp_reduce_op),
    ("factor", c_double),
    ("root", c_int),
    ("unit", c_char_p),
    ("view", POINTER(fsdp_comm_view)),
    ("stream", c_void_p)]
FSDP_COMM_AVG = 1
FSDP_COMM_PREMUL_SUM = 2
FSDP_COMM_POOL = 4
FSDP_COMM_STREAMS = 8
FSDP_COMM_DEVICE_MEMORY = 16
fsdp_param_spec._fields_ = [
    ("name", c_char_p),
    ("dtype", fsdp_dtype),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("is_buffer", c_bool),
    ("is_transient", c_bool)]
fsdp_param_info._fields_ = [
    ("name", c_char_p),
    ("dtype", fsdp_dtype),
    ("data_dtype", fsdp_dtype),
    ("grad_dtype", fsdp_dtype),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("is_buffer", c_bool),
    ("requires_grad", c_bool),
    ("aliases", POINTER(c_char_p)),
    ("alias_count", c_size_t),
    ("layout", POINTER(fsdp_layout))]
fsdp_param_place._fields_ = [
    ("dim", c_int),
    ("mesh", c_void_p)]
fsdp_grad_hook = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(fsdp_error))
fsdp_extension._fields_ = [
    ("context", c_void_p),
    ("count", c_size_t),
    ("sizes", POINTER(c_size_t)),
    ("pre", CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, POINTER(c_void_p), POINTER(fsdp_error))),
    ("post", CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_void_p), c_size_t, c_void_p, POINTER(fsdp_error)))]
class fsdp_memory_class(Enum):
    words = {"shard": 0, "unsharded": 1, "all_gather": 2, "reduce": 3, "grad": 4, "optim": 5, "classes": 6}

FSDP_MEMORY_SHARD = 0
FSDP_MEMORY_UNSHARDED = 1
FSDP_MEMORY_ALL_GATHER = 2
FSDP_MEMORY_REDUCE = 3
FSDP_MEMORY_GRAD = 4
FSDP_MEMORY_OPTIM = 5
FSDP_MEMORY_CLASSES = 6
fsdp_memory._fields_ = [
    ("now", c_int64 * 6),
    ("peak", c_int64 * 6),
    ("total_now", c_int64),
    ("total_peak", c_int64)]
FSDP_RESHARD_AUTO = 0
FSDP_RESHARD_ALWAYS = 1
FSDP_RESHARD_NEVER = -1
fsdp_all_reduce_hook = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64, POINTER(fsdp_error))
fsdp_custom_collective._fields_ = [
    ("context", c_void_p),
    ("alloc", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
    ("dealloc", CFUNCTYPE(None, c_void_p, c_void_p)),
    ("run", CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(fsdp_collective), POINTER(fsdp_error)))]
fsdp_unit_opts._fields_ = [
    ("mesh", c_void_p),
    ("shard_dims", c_char_p),
    ("replicate_dims", c_char_p),
    ("reshard_after_forward", c_int),
    ("param_dtype", fsdp_dtype),
    ("reduce_dtype", fsdp_dtype),
    ("output_dtype", fsdp_dtype),
    ("keep_input_dtype", c_bool),
    ("offload", c_bool),
    ("context", c_void_p),
    ("placement", CFUNCTYPE(None, c_void_p, c_void_p, POINTER(fsdp_param_place))),
    ("param_dtype_of", CFUNCTYPE(c_int, c_void_p, c_void_p)),
    ("ignore", CFUNCTYPE(c_bool, c_void_p, c_void_p))]
class fsdp_hook(Enum):
    words = {"pre_forward": 0, "post_forward": 1, "pre_backward": 2, "post_backward": 3}

FSDP_HOOK_PRE_FORWARD = 0
FSDP_HOOK_POST_FORWARD = 1
FSDP_HOOK_PRE_BACKWARD = 2
FSDP_HOOK_POST_BACKWARD = 3
class fsdp_unit_setting(Enum):
    words = {"requires_gradient_sync": 0, "requires_all_reduce": 1, "reshard_after_forward": 2, "reshard_after_backward": 3, "unshard_in_backward": 4, "keep_unsharded_storage": 5, "unshard_async_op": 6, "force_sum_reduction_for_comms": 7, "reduce_scatter_unused_params": 8, "reduce_scatter_max_input_buffers": 9, "separate_reduce_scatter_group": 10, "allocate_memory_from_process_group": 11}

FSDP_UNIT_REQUIRES_GRADIENT_SYNC = 0
FSDP_UNIT_REQUIRES_ALL_REDUCE = 1
FSDP_UNIT_RESHARD_AFTER_FORWARD = 2
FSDP_UNIT_RESHARD_AFTER_BACKWARD = 3
FSDP_UNIT_UNSHARD_IN_BACKWARD = 4
FSDP_UNIT_KEEP_UNSHARDED_STORAGE = 5
FSDP_UNIT_UNSHARD_ASYNC_OP = 6
FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS = 7
FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS = 8
FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS = 9
FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP = 10
FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP = 11
fsdp_optim_group._fields_ = [
    ("match", CFUNCTYPE(c_bool, c_void_p, c_void_p)),
    ("context", c_void_p),
    ("lr", c_double),
    ("weight_decay", c_double)]
fsdp_adamw_opts._fields_ = [
    ("lr", c_double),
    ("beta1", c_double),
    ("beta2", c_double),
    ("eps", c_double),
    ("weight_decay", c_double),
    ("maximize", c_bool),
    ("step_in_param_dtype", c_bool),
    ("moment_dtype", fsdp_dtype),
    ("groups", POINTER(fsdp_optim_group)),
    ("group_count", c_size_t)]
fsdp_sgd_opts._fields_ = [
    ("lr", c_double),
    ("momentum", c_double),
    ("dampening", c_double),
    ("weight_decay", c_double),
    ("nesterov", c_bool),
    ("maximize", c_bool),
    ("step_in_param_dtype", c_bool),
    ("moment_dtype", fsdp_dtype),
    ("groups", POINTER(fsdp_optim_group)),
    ("group_count", c_size_t)]
FSDP_OPTIM_TENSORS = 4
fsdp_optim_tensor._fields_ = [
    ("name", c_char_p),
    ("dtype", fsdp_dtype),
    ("ndim", c_int),
    ("shape", POINTER(c_int64)),
    ("layout", fsdp_layout),
    ("data", c_void_p)]
fsdp_clip_opts._fields_ = [
    ("max_norm", c_double),
    ("norm_type", c_double),
    ("error_if_nonfinite", c_bool)]
fsdp_scaler_opts._fields_ = [
    ("init_scale", c_double),
    ("growth_factor", c_double),
    ("backoff_factor", c_double),
    ("growth_interval", c_int64)]
class fsdp_schedule_kind(Enum):
    words = {"constant": 0, "linear": 1, "cosine": 2}

FSDP_SCHEDULE_CONSTANT = 0
FSDP_SCHEDULE_LINEAR = 1
FSDP_SCHEDULE_COSINE = 2
fsdp_schedule._fields_ = [
    ("kind", fsdp_schedule_kind),
    ("warmup", c_int64),
    ("total", c_int64),
    ("end", c_double)]
fsdp_param_fill = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(fsdp_box), c_void_p, POINTER(fsdp_error))
class fsdp_state_part(Enum):
    words = {"all": 0, "model": 1, "optim": 2}

FSDP_STATE_ALL = 0
FSDP_STATE_MODEL = 1
FSDP_STATE_OPTIM = 2
fsdp_state_opts._fields_ = [
    ("part", fsdp_state_part),
    ("optims", POINTER(c_void_p)),
    ("optim_count", c_size_t),
    ("ignore_frozen", c_bool),
    ("full_state_dict", c_bool),
    ("cpu_offload", c_bool),
    ("broadcast_from_rank0", c_bool),
    ("partial", c_bool),
    ("nested_optim", c_bool),
    ("model_prefix", c_char_p),
    ("optim_prefix", c_char_p),
    ("submodules", POINTER(c_char_p)),
    ("submodule_count", c_size_t),
    ("drop_submodule_prefixes", c_bool),
    ("rename", CFUNCTYPE(c_char_p, c_void_p, c_char_p)),
    ("context", c_void_p)]
fsdp_root_save_opts._fields_ = [
    ("state", fsdp_state_opts),
    ("save", fsdp_save_opts),
    ("into_run", c_bool),
    ("extra", c_void_p)]
fsdp_root_load_opts._fields_ = [
    ("state", fsdp_state_opts),
    ("load", fsdp_load_opts),
    ("extra", c_void_p),
    ("step", POINTER(c_int64))]
fsdp_async_opts._fields_ = [
    ("deadline_ms", c_int),
    ("allow_equal", c_bool),
    ("pool_bytes", c_int64)]
fsdp_async_report._fields_ = [
    ("path", c_char_p),
    ("step", c_int64),
    ("bytes", c_int64),
    ("pool_bytes", c_int64),
    ("wait_ms", c_double),
    ("stall_ms", c_double),
    ("write_ms", c_double),
    ("is_stale", c_bool)]
class fsdp_wrap_strategy(Enum):
    words = {"full_shard": 0, "shard_grad_op": 1, "no_shard": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 4}

FSDP_WRAP_FULL_SHARD = 0
FSDP_WRAP_SHARD_GRAD_OP = 1
FSDP_WRAP_NO_SHARD = 2
FSDP_WRAP_HYBRID_SHARD = 3
FSDP_WRAP_HYBRID_SHARD_ZERO2 = 4
class fsdp_wrap_prefetch(Enum):
    words = {"pre": 0, "post": 1, "none": 2}

FSDP_WRAP_BACKWARD_PRE = 0
FSDP_WRAP_BACKWARD_POST = 1
FSDP_WRAP_BACKWARD_NONE = 2
fsdp_wrap_unit_opts._fields_ = [
    ("strategy", fsdp_wrap_strategy),
    ("backward_prefetch", fsdp_wrap_prefetch),
    ("forward_prefetch", c_bool),
    ("param_dtype", fsdp_dtype),
    ("reduce_dtype", fsdp_dtype),
    ("offload_params", c_bool)]
fsdp_wrap_module._fields_ = [
    ("name", c_char_p),
    ("type", c_char_p),
    ("unwrapped", c_int64),
    ("is_list", c_bool)]
class fsdp_wrap_policy_kind(Enum):
    words = {"none": 0, "always": 1, "names": 2, "types": 3, "size": 4, "custom": 5}

FSDP_POLICY_NONE = 0
FSDP_POLICY_ALWAYS = 1
FSDP_POLICY_NAMES = 2
FSDP_POLICY_TYPES = 3
FSDP_POLICY_SIZE = 4
FSDP_POLICY_CUSTOM = 5
fsdp_wrap_policy._fields_ = [
    ("kind", fsdp_wrap_policy_kind),
    ("names", POINTER(c_char_p)),
    ("name_count", c_size_t),
    ("min_elements", c_int64),
    ("context", c_void_p),
    ("type_of", CFUNCTYPE(c_char_p, c_void_p, c_char_p)),
    ("wants", CFUNCTYPE(c_bool, c_void_p, POINTER(fsdp_wrap_module), POINTER(fsdp_wrap_unit_opts))),
    ("full_precision_types", POINTER(c_char_p)),
    ("full_precision_count", c_size_t)]
fsdp_wrap_opts._fields_ = [
    ("mesh", c_void_p),
    ("unit", fsdp_wrap_unit_opts),
    ("policy", fsdp_wrap_policy),
    ("use_orig_params", c_bool),
    ("unlimited_gathers", c_bool),
    ("buffer_dtype", fsdp_dtype),
    ("ignored_modules", POINTER(c_char_p)),
    ("ignored_states", POINTER(c_char_p)),
    ("ignored_module_count", c_size_t),
    ("ignored_state_count", c_size_t)]
class fsdp_wrap_training(Enum):
    words = {"idle": 0, "forward_backward": 1, "summon_full_params": 2}

FSDP_WRAP_IDLE = 0
FSDP_WRAP_FORWARD_BACKWARD = 1
FSDP_WRAP_SUMMON_FULL_PARAMS = 2
fsdp_wrap_place._fields_ = [
    ("flat", c_void_p),
    ("offset", c_int64),
    ("count", c_int64),
    ("first", c_int64),
    ("local", c_int64),
    ("at", c_int64)]
fsdp_wrap_bucket._fields_ = [
    ("unit", c_char_p),
    ("dtype", fsdp_dtype),
    ("grad", c_void_p),
    ("count", c_int64),
    ("shard", c_void_p),
    ("wrap", c_void_p),
    ("stream", c_void_p),
    ("native", c_void_p)]
fsdp_wrap_comm_hook = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(fsdp_wrap_bucket), POINTER(fsdp_error))
fsdp_wrap_summon_opts._fields_ = [
    ("only_unit", c_bool),
    ("discard_changes", c_bool),
    ("rank0_only", c_bool),
    ("offload_to_cpu", c_bool),
    ("with_grads", c_bool)]
fsdp_wrap_optim_input._fields_ = [
    ("names", POINTER(c_char_p)),
    ("count", c_size_t)]
class fsdp_wrap_key_type(Enum):
    words = {"name": 0, "id": 1}

FSDP_WRAP_PARAM_NAME = 0
FSDP_WRAP_PARAM_ID = 1

# name: its result and its parameters
FUNCTIONS = {
    "fsdp_error_report": lambda: (c_int, [POINTER(fsdp_error)]),
    "fsdp_status_name": lambda: (c_char_p, [c_int]),
    "fsdp_version": lambda: (c_char_p, []),
    "fsdp_dtype_describe": lambda: (POINTER(fsdp_dtype_info), [c_int]),
    "fsdp_dtype_size": lambda: (c_size_t, [c_int]),
    "fsdp_dtype_name": lambda: (c_char_p, [c_int]),
    "fsdp_dtype_from_name": lambda: (c_int, [c_char_p, c_size_t]),
    "fsdp_dtype_from_typed": lambda: (c_int, [c_char_p, c_size_t]),
    "fsdp_box_whole": lambda: (fsdp_box, [c_int, POINTER(c_int64)]),
    "fsdp_shape_count": lambda: (c_int64, [c_int, POINTER(c_int64)]),
    "fsdp_box_count": lambda: (c_int64, [POINTER(fsdp_box)]),
    "fsdp_box_equal": lambda: (c_bool, [POINTER(fsdp_box), POINTER(fsdp_box)]),
    "fsdp_box_position": lambda: (c_int64, [c_int, POINTER(c_int64), POINTER(c_int64)]),
    "fsdp_chunk": lambda: (None, [c_int64, c_int64, c_int64, POINTER(c_int64), POINTER(c_int64)]),
    "fsdp_stats_add": lambda: (None, [POINTER(fsdp_stats), c_int, c_void_p, c_int64]),
    "fsdp_rects_copy": lambda: (None, [POINTER(fsdp_rect), c_size_t]),
    "fsdp_format_at": lambda: (POINTER(fsdp_format), [c_size_t]),
    "fsdp_format_from": lambda: (POINTER(fsdp_format), [c_char_p]),
    "fsdp_format_to": lambda: (POINTER(fsdp_format), [c_char_p]),
    "fsdp_mesh_create": lambda: (c_int, [c_int, POINTER(c_int64), POINTER(c_char_p), POINTER(c_int), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_mesh_free": lambda: (None, [c_void_p]),
    "fsdp_mesh_ndim": lambda: (c_int, [c_void_p]),
    "fsdp_mesh_dim_size": lambda: (c_int64, [c_void_p, c_int]),
    "fsdp_mesh_dim_name": lambda: (c_char_p, [c_void_p, c_int]),
    "fsdp_mesh_size": lambda: (c_int64, [c_void_p]),
    "fsdp_mesh_coord": lambda: (c_bool, [c_void_p, c_int, POINTER(c_int64)]),
    "fsdp_mesh_equal": lambda: (c_bool, [c_void_p, c_void_p]),
    "fsdp_layout_box_count": lambda: (c_size_t, [POINTER(fsdp_layout), c_int, POINTER(c_int64), c_int]),
    "fsdp_layout_box_at": lambda: (None, [POINTER(fsdp_layout), c_int, POINTER(c_int64), c_int, c_size_t, POINTER(fsdp_box)]),
    "fsdp_layout_mesh_box": lambda: (c_bool, [POINTER(fsdp_layout), c_int, POINTER(c_int64), c_int, POINTER(fsdp_box)]),
    "fsdp_value_bool": lambda: (fsdp_value, [c_bool]),
    "fsdp_value_i64": lambda: (fsdp_value, [c_int64]),
    "fsdp_value_u64": lambda: (fsdp_value, [c_uint64]),
    "fsdp_value_f64": lambda: (fsdp_value, [c_double]),
    "fsdp_value_set_bytes": lambda: (c_int, [POINTER(fsdp_value), c_int, c_void_p, c_size_t, POINTER(fsdp_error)]),
    "fsdp_value_set_items": lambda: (c_int, [POINTER(fsdp_value), c_int, c_size_t, POINTER(fsdp_error)]),
    "fsdp_value_per_rank": lambda: (POINTER(fsdp_value), [POINTER(fsdp_value)]),
    "fsdp_value_copy": lambda: (c_int, [POINTER(fsdp_value), POINTER(fsdp_value), POINTER(fsdp_error)]),
    "fsdp_value_equal": lambda: (c_bool, [POINTER(fsdp_value), POINTER(fsdp_value)]),
    "fsdp_path_default": lambda: (c_size_t, [c_char_p, c_size_t, POINTER(c_int32)]),
    "fsdp_value_release": lambda: (None, [POINTER(fsdp_value)]),
    "fsdp_sd_create": lambda: (c_int, [POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_sd_free": lambda: (None, [c_void_p]),
    "fsdp_sd_add_tensor": lambda: (c_int, [c_void_p, c_char_p, c_size_t, POINTER(fsdp_tensor), POINTER(fsdp_error)]),
    "fsdp_sd_add_value": lambda: (c_int, [c_void_p, c_char_p, c_size_t, POINTER(fsdp_value), POINTER(fsdp_error)]),
    "fsdp_sd_add_alias": lambda: (c_int, [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, POINTER(fsdp_error)]),
    "fsdp_sd_set_path": lambda: (c_int, [c_void_p, c_size_t, POINTER(c_int32), c_size_t, POINTER(fsdp_error)]),
    "fsdp_sd_add_flat": lambda: (c_int, [c_void_p, c_char_p, c_size_t, POINTER(fsdp_flat_buffer), POINTER(fsdp_error)]),
    "fsdp_sd_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_sd_at": lambda: (POINTER(fsdp_entry), [c_void_p, c_size_t]),
    "fsdp_sd_find": lambda: (c_int64, [c_void_p, c_char_p, c_size_t]),
    "fsdp_sd_set_data": lambda: (None, [c_void_p, c_size_t, c_void_p]),
    "fsdp_sd_set_value": lambda: (None, [c_void_p, c_size_t, POINTER(fsdp_value)]),
    "fsdp_sd_allocate": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_error)]),
    "fsdp_entry_bytes": lambda: (c_int64, [POINTER(fsdp_entry)]),
    "fsdp_entry_local_bytes": lambda: (c_int64, [POINTER(fsdp_entry), c_int]),
    "fsdp_sd_state_is_optim": lambda: (c_bool, [c_void_p]),
    "fsdp_entry_is_optim": lambda: (c_bool, [POINTER(fsdp_entry), c_bool]),
    "fsdp_ctl_self": lambda: (c_int, [POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_ctl_free": lambda: (None, [c_void_p]),
    "fsdp_ctl_rank": lambda: (c_int, [c_void_p]),
    "fsdp_ctl_size": lambda: (c_int, [c_void_p]),
    "fsdp_ctl_set_deadline": lambda: (None, [c_void_p, c_int]),
    "fsdp_ctl_allgather": lambda: (c_int, [c_void_p, c_void_p, c_size_t, c_void_p, POINTER(fsdp_error)]),
    "fsdp_ctl_broadcast": lambda: (c_int, [c_void_p, c_int, c_void_p, c_size_t, POINTER(fsdp_error)]),
    "fsdp_ctl_agree": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_error)]),
    "fsdp_ctl_barrier": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_ctl_run_threads": lambda: (c_int, [c_int, fsdp_rank_body, c_void_p, POINTER(fsdp_error)]),
    "fsdp_filter_create": lambda: (c_int, [c_char_p, c_char_p, POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_filter_free": lambda: (None, [c_void_p]),
    "fsdp_filter_selects": lambda: (c_bool, [c_void_p, c_char_p, c_size_t]),
    "fsdp_sd_save": lambda: (c_int, [c_void_p, c_void_p, c_char_p, POINTER(fsdp_save_opts), POINTER(fsdp_error)]),
    "fsdp_save_plan_bytes": lambda: (c_int, [c_void_p, c_int, c_int, c_int, POINTER(c_int64), POINTER(fsdp_error)]),
    "fsdp_load_report_release": lambda: (None, [POINTER(fsdp_load_report)]),
    "fsdp_sd_load": lambda: (c_int, [c_void_p, c_void_p, c_char_p, POINTER(fsdp_load_opts), POINTER(fsdp_error)]),
    "fsdp_sd_gather": lambda: (c_int, [c_void_p, c_void_p, c_int64, fsdp_slab_visit, c_void_p, POINTER(fsdp_error)]),
    "fsdp_sd_gather_full": lambda: (c_int, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_load_full": lambda: (c_int, [c_char_p, POINTER(fsdp_load_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_stream_full": lambda: (c_int, [c_char_p, POINTER(fsdp_load_opts), fsdp_slab_visit, c_void_p, POINTER(fsdp_error)]),
    "fsdp_checkpoint_open": lambda: (c_int, [c_char_p, POINTER(fsdp_open_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_checkpoint_close": lambda: (None, [c_void_p]),
    "fsdp_checkpoint_missing_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_checkpoint_missing_at": lambda: (c_char_p, [c_void_p, c_size_t, POINTER(c_size_t)]),
    "fsdp_checkpoint_describe": lambda: (POINTER(fsdp_checkpoint_info), [c_void_p]),
    "fsdp_checkpoint_sd": lambda: (c_void_p, [c_void_p]),
    "fsdp_checkpoint_file_at": lambda: (None, [c_void_p, c_int, POINTER(fsdp_checkpoint_file)]),
    "fsdp_checkpoint_stored_box_at": lambda: (c_bool, [c_void_p, c_size_t, c_size_t, POINTER(fsdp_box), POINTER(c_int)]),
    "fsdp_checkpoint_read": lambda: (c_int, [c_void_p, c_size_t, POINTER(fsdp_box), c_void_p, c_int, POINTER(fsdp_error)]),
    "fsdp_checkpoint_stream": lambda: (c_int, [c_void_p, c_size_t, c_int64, fsdp_slab_visit, c_void_p, POINTER(fsdp_error)]),
    "fsdp_checkpoint_stream_inner": lambda: (c_int, [c_void_p, c_uint64, c_int64, fsdp_slab_visit, c_void_p, POINTER(fsdp_error)]),
    "fsdp_checkpoint_check": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_watch), POINTER(fsdp_error)]),
    "fsdp_checkpoint_open_value": lambda: (c_int, [POINTER(fsdp_value), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_checkpoint_extra": lambda: (c_char_p, [c_void_p, c_char_p]),
    "fsdp_checkpoint_verify": lambda: (c_int, [c_char_p, POINTER(fsdp_verify_opts), POINTER(fsdp_verify_summary), POINTER(fsdp_error)]),
    "fsdp_checkpoint_verify_like": lambda: (c_int, [c_char_p, c_char_p, POINTER(fsdp_verify_opts), POINTER(fsdp_like_summary), POINTER(fsdp_error)]),
    "fsdp_run_save": lambda: (c_int, [c_void_p, c_void_p, c_char_p, c_int64, POINTER(fsdp_save_opts), POINTER(fsdp_error)]),
    "fsdp_path_has_manifest": lambda: (c_bool, [c_char_p, POINTER(fsdp_access)]),
    "fsdp_path_is_run": lambda: (c_int, [c_char_p, POINTER(fsdp_access), POINTER(c_bool), POINTER(fsdp_error)]),
    "fsdp_run_list": lambda: (c_int, [c_char_p, POINTER(fsdp_access), POINTER(fsdp_run_steps), POINTER(fsdp_error)]),
    "fsdp_run_steps_release": lambda: (None, [POINTER(fsdp_run_steps)]),
    "fsdp_run_latest": lambda: (c_int, [c_char_p, c_int, POINTER(fsdp_watch), POINTER(fsdp_access), POINTER(c_char_p), POINTER(fsdp_error)]),
    "fsdp_string_free": lambda: (None, [c_char_p]),
    "fsdp_checkpoint_resolve": lambda: (c_int, [c_char_p, POINTER(fsdp_open_opts), POINTER(fsdp_watch), POINTER(c_char_p), POINTER(fsdp_error)]),
    "fsdp_run_retain": lambda: (c_int, [c_char_p, POINTER(fsdp_retention), POINTER(fsdp_retain_opts), POINTER(fsdp_error)]),
    "fsdp_checkpoint_convert": lambda: (c_int, [c_char_p, c_char_p, POINTER(fsdp_convert_opts), POINTER(fsdp_error)]),
    "fsdp_convert_format_at": lambda: (c_char_p, [c_size_t]),
    "fsdp_convert_format_of": lambda: (c_char_p, [c_char_p]),
    "fsdp_castable_at": lambda: (c_char_p, [c_size_t]),
    "fsdp_conversion_open": lambda: (c_int, [c_char_p, c_char_p, POINTER(fsdp_convert_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_conversion_apply": lambda: (c_int, [c_char_p, POINTER(fsdp_convert_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_conversion_plan": lambda: (POINTER(fsdp_convert_plan), [c_void_p]),
    "fsdp_conversion_write_plan": lambda: (c_int, [c_void_p, c_char_p, POINTER(fsdp_error)]),
    "fsdp_conversion_run": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_conversion_result": lambda: (c_int, [c_void_p, fsdp_file_digest_visit, c_void_p, POINTER(fsdp_error)]),
    "fsdp_conversion_write_digests": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_conversion_close": lambda: (None, [c_void_p]),
    "fsdp_checkpoint_map": lambda: (c_int, [POINTER(c_void_p), POINTER(fsdp_map_opts), POINTER(fsdp_error)]),
    "fsdp_convert_option_at": lambda: (POINTER(fsdp_convert_option), [c_size_t]),
    "fsdp_checkpoint_diff": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_diff_opts), POINTER(fsdp_diff_summary), POINTER(fsdp_error)]),
    "fsdp_ctl_connect": lambda: (c_int, [POINTER(fsdp_connect_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_world_rank": lambda: (c_int, [c_void_p]),
    "fsdp_world_size": lambda: (c_int, [c_void_p]),
    "fsdp_world_local_rank": lambda: (c_int, [c_void_p]),
    "fsdp_world_local_size": lambda: (c_int, [c_void_p]),
    "fsdp_world_ctl": lambda: (c_void_p, [c_void_p]),
    "fsdp_world_mesh": lambda: (c_int, [c_void_p, c_int, POINTER(c_int64), POINTER(c_char_p), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_world_connect": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_error)]),
    "fsdp_world_comm": lambda: (c_void_p, [c_void_p, c_void_p, c_int, c_int]),
    "fsdp_world_mark": lambda: (None, [c_void_p, c_char_p]),
    "fsdp_world_sum": lambda: (c_int, [c_void_p, POINTER(c_double), c_size_t, POINTER(fsdp_error)]),
    "fsdp_world_max": lambda: (c_int, [c_void_p, POINTER(c_double), c_size_t, POINTER(fsdp_error)]),
    "fsdp_world_mean": lambda: (c_int, [c_void_p, POINTER(c_double), POINTER(fsdp_error)]),
    "fsdp_world_set_deadline": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_error)]),
    "fsdp_world_begin_busy": lambda: (None, [c_void_p, c_int]),
    "fsdp_world_end_busy": lambda: (None, [c_void_p]),
    "fsdp_world_fail": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_launch": lambda: (c_int, [c_int, POINTER(c_char_p), fsdp_rank_main, c_void_p]),
    "fsdp_launch_find_device": lambda: (c_int, [c_char_p, POINTER(fsdp_error)]),
    "fsdp_comm_rank": lambda: (c_int, [c_void_p]),
    "fsdp_comm_size": lambda: (c_int, [c_void_p]),
    "fsdp_comm_ranks": lambda: (POINTER(c_int), [c_void_p]),
    "fsdp_comm_backend": lambda: (c_char_p, [c_void_p]),
    "fsdp_comm_abilities": lambda: (c_uint, [c_void_p]),
    "fsdp_comm_run": lambda: (c_int, [c_void_p, POINTER(fsdp_collective), POINTER(fsdp_error)]),
    "fsdp_comm_start": lambda: (c_int, [c_void_p, POINTER(fsdp_collective), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_comm_is_done": lambda: (c_bool, [c_void_p]),
    "fsdp_comm_wait": lambda: (c_int, [POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_comm_alloc": lambda: (c_void_p, [c_void_p, c_size_t]),
    "fsdp_comm_dealloc": lambda: (None, [c_void_p, c_void_p]),
    "fsdp_comm_abort": lambda: (None, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_model_create": lambda: (c_int, [c_void_p, POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_model_free": lambda: (None, [c_void_p]),
    "fsdp_model_add": lambda: (c_int, [c_void_p, POINTER(fsdp_param_spec), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_model_add_alias": lambda: (c_int, [c_void_p, c_char_p, c_void_p, POINTER(fsdp_error)]),
    "fsdp_model_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_model_at": lambda: (c_void_p, [c_void_p, c_size_t]),
    "fsdp_model_find": lambda: (c_void_p, [c_void_p, c_char_p]),
    "fsdp_param_name": lambda: (c_char_p, [c_void_p]),
    "fsdp_param_describe": lambda: (fsdp_param_info, [c_void_p]),
    "fsdp_param_set_grad_dtype": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_error)]),
    "fsdp_param_set_placement": lambda: (c_int, [c_void_p, c_char_p, fsdp_placement, POINTER(fsdp_error)]),
    "fsdp_param_set_post_accumulate_hook": lambda: (None, [c_void_p, fsdp_grad_hook, c_void_p]),
    "fsdp_param_set_extension": lambda: (c_int, [c_void_p, POINTER(fsdp_extension), POINTER(fsdp_error)]),
    "fsdp_unit_create": lambda: (c_int, [c_void_p, c_char_p, POINTER(fsdp_unit_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_unit_name": lambda: (c_char_p, [c_void_p]),
    "fsdp_unit_param_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_unit_param_at": lambda: (c_void_p, [c_void_p, c_size_t]),
    "fsdp_unit_pre_forward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_unit_post_forward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_unit_pre_backward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_unit_post_backward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_param_shard": lambda: (c_void_p, [c_void_p, POINTER(fsdp_box)]),
    "fsdp_param_data": lambda: (c_void_p, [c_void_p]),
    "fsdp_param_data_box": lambda: (None, [c_void_p, POINTER(fsdp_box)]),
    "fsdp_param_grad": lambda: (c_void_p, [c_void_p]),
    "fsdp_param_grad_raw": lambda: (c_void_p, [c_void_p]),
    "fsdp_param_shard_grad": lambda: (c_void_p, [c_void_p]),
    "fsdp_param_error": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_param_set_requires_grad": lambda: (c_int, [c_void_p, c_bool, POINTER(fsdp_error)]),
    "fsdp_unit_unshard": lambda: (c_int, [c_void_p, c_bool, POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_unshard_wait": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_unit_reshard": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_unit_set": lambda: (c_int, [c_void_p, c_int, c_int, c_bool, POINTER(fsdp_error)]),
    "fsdp_unit_set_gradient_divide_factor": lambda: (c_int, [c_void_p, c_double, POINTER(fsdp_error)]),
    "fsdp_unit_set_prefetch": lambda: (c_int, [c_void_p, c_int, POINTER(c_void_p), c_size_t, POINTER(fsdp_error)]),
    "fsdp_unit_create_list": lambda: (c_int, [c_void_p, POINTER(c_char_p), c_size_t, POINTER(fsdp_unit_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_unit_member_hook": lambda: (c_int, [c_void_p, c_size_t, c_int, POINTER(fsdp_error)]),
    "fsdp_unit_set_all_reduce_hook": lambda: (None, [c_void_p, fsdp_all_reduce_hook, c_void_p]),
    "fsdp_unit_set_custom_collective": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_custom_collective), POINTER(fsdp_error)]),
    "fsdp_unit_input_dtype": lambda: (c_int, [c_void_p, c_int]),
    "fsdp_unit_output_dtype": lambda: (c_int, [c_void_p, c_int]),
    "fsdp_cast": lambda: (None, [c_void_p, c_int, c_void_p, c_int, c_size_t]),
    "fsdp_root_create": lambda: (c_int, [c_void_p, POINTER(fsdp_unit_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_root_free": lambda: (None, [c_void_p]),
    "fsdp_root_unit": lambda: (c_void_p, [c_void_p]),
    "fsdp_root_unit_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_root_unit_at": lambda: (c_void_p, [c_void_p, c_size_t]),
    "fsdp_root_begin_forward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_end_forward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_end_backward": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_begin_microbatch": lambda: (c_int, [c_void_p, c_int64, c_int64, POINTER(fsdp_error)]),
    "fsdp_root_set_evaluating": lambda: (c_int, [c_void_p, c_bool, POINTER(fsdp_error)]),
    "fsdp_root_zero_grad": lambda: (None, [c_void_p]),
    "fsdp_root_reset": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_memory": lambda: (fsdp_memory, [c_void_p]),
    "fsdp_root_reset_peak": lambda: (None, [c_void_p]),
    "fsdp_root_expect_values": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_share_context": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_set_is_last_backward": lambda: (None, [c_void_p, c_bool]),
    "fsdp_root_set_post_optim_event": lambda: (None, [c_void_p]),
    "fsdp_root_set_manual_backward_finalization": lambda: (c_int, [c_void_p, c_bool, POINTER(fsdp_error)]),
    "fsdp_root_finalize_backward": lambda: (c_int, [c_void_p, c_bool, POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_finalize_wait": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_adamw_create": lambda: (c_int, [c_void_p, POINTER(fsdp_adamw_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_sgd_create": lambda: (c_int, [c_void_p, POINTER(fsdp_sgd_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_optim_free": lambda: (None, [c_void_p]),
    "fsdp_optim_step": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_optim_group_count": lambda: (c_size_t, [c_void_p]),
    "fsdp_optim_lr": lambda: (c_double, [c_void_p, c_size_t]),
    "fsdp_optim_set_lr": lambda: (c_int, [c_void_p, c_size_t, c_double, POINTER(fsdp_error)]),
    "fsdp_optim_refresh_masters": lambda: (None, [c_void_p]),
    "fsdp_optim_describe_state": lambda: (c_size_t, [c_void_p, c_void_p, POINTER(fsdp_optim_tensor)]),
    "fsdp_root_clip_grad_norm": lambda: (c_int, [c_void_p, POINTER(fsdp_clip_opts), POINTER(c_double), POINTER(fsdp_error)]),
    "fsdp_root_grad_norm": lambda: (c_int, [c_void_p, c_int, POINTER(c_double), POINTER(fsdp_error)]),
    "fsdp_scaler_create": lambda: (c_int, [POINTER(fsdp_scaler_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_scaler_free": lambda: (None, [c_void_p]),
    "fsdp_scaler_scale": lambda: (c_double, [c_void_p]),
    "fsdp_scaler_unscale": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_error)]),
    "fsdp_scaler_step": lambda: (c_int, [c_void_p, c_void_p, POINTER(c_bool), POINTER(fsdp_error)]),
    "fsdp_schedule_factor": lambda: (c_double, [POINTER(fsdp_schedule), c_int64]),
    "fsdp_uniform": lambda: (c_double, [c_uint64, c_char_p, c_uint64]),
    "fsdp_root_init_uniform": lambda: (c_int, [c_void_p, c_uint64, POINTER(fsdp_error)]),
    "fsdp_root_init": lambda: (c_int, [c_void_p, fsdp_param_fill, c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_sync_from_rank0": lambda: (c_int, [c_void_p, fsdp_param_fill, c_void_p, POINTER(fsdp_error)]),
    "fsdp_root_get_state": lambda: (c_int, [c_void_p, POINTER(fsdp_state_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_root_set_state": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_state_opts), POINTER(fsdp_load_report), POINTER(fsdp_error)]),
    "fsdp_root_save": lambda: (c_int, [c_void_p, c_char_p, POINTER(fsdp_root_save_opts), POINTER(fsdp_error)]),
    "fsdp_root_load": lambda: (c_int, [c_void_p, c_char_p, POINTER(fsdp_root_load_opts), POINTER(fsdp_error)]),
    "fsdp_async_saver_create": lambda: (c_int, [c_void_p, POINTER(fsdp_async_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_async_saver_free": lambda: (None, [c_void_p]),
    "fsdp_async_save": lambda: (c_int, [c_void_p, c_char_p, POINTER(fsdp_root_save_opts), POINTER(fsdp_error)]),
    "fsdp_async_save_wait": lambda: (c_int, [c_void_p, POINTER(fsdp_async_report), POINTER(fsdp_error)]),
    "fsdp_async_save_is_done": lambda: (c_bool, [c_void_p]),
    "fsdp_wrap_create": lambda: (c_int, [c_void_p, POINTER(fsdp_wrap_opts), POINTER(c_void_p), POINTER(fsdp_error)]),
    "fsdp_wrap_free": lambda: (None, [c_void_p]),
    "fsdp_wrap_root": lambda: (c_void_p, [c_void_p]),
    "fsdp_wrap_unit": lambda: (c_void_p, [c_void_p, c_char_p]),
    "fsdp_wrap_flat_param": lambda: (c_void_p, [c_void_p, c_void_p]),
    "fsdp_wrap_training_state": lambda: (c_int, [c_void_p]),
    "fsdp_wrap_place_of": lambda: (fsdp_wrap_place, [c_void_p]),
    "fsdp_wrap_set_accumulating": lambda: (c_int, [c_void_p, c_bool, POINTER(fsdp_error)]),
    "fsdp_wrap_register_comm_hook": lambda: (c_int, [c_void_p, fsdp_wrap_comm_hook, c_void_p, POINTER(fsdp_error)]),
    "fsdp_wrap_fp16_compress_hook": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_wrap_bucket), POINTER(fsdp_error)]),
    "fsdp_wrap_bf16_compress_hook": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_wrap_bucket), POINTER(fsdp_error)]),
    "fsdp_wrap_summon_full_params": lambda: (c_int, [c_void_p, c_void_p, POINTER(fsdp_wrap_summon_opts), POINTER(fsdp_error)]),
    "fsdp_wrap_summon_end": lambda: (c_int, [c_void_p, POINTER(fsdp_error)]),
    "fsdp_wrap_rekey_optim_state": lambda: (c_int, [c_void_p, c_int, POINTER(fsdp_wrap_optim_input), POINTER(c_void_p), POINTER(fsdp_error)]),
}
