/*
 * The globals that a checkpoint may name: which one it is, and what its objects take (items, a
 * state, calls). The policy says what may be done with them. See pickle.h.
 */
#include "formats/pickle/pickle_vm.h"
#include <fsdp/dtype.h>

#include <stdio.h>
#include <string.h>

typedef struct rule {
    const char *module; /* a trailing '*': a prefix of whole elements */
    const char *name;   /* a trailing '*': a prefix */
    fsdp_known known;
} rule;

static const rule rules[] = {
    {"builtins", "set", FSDP_KNOWN_SET},
    {"builtins", "frozenset", FSDP_KNOWN_FROZENSET},
    {"builtins", "bytes", FSDP_KNOWN_BYTES},
    {"builtins", "bytearray", FSDP_KNOWN_BYTEARRAY},
    {"builtins", "complex", FSDP_KNOWN_COMPLEX},
    {"builtins", "slice", FSDP_KNOWN_SLICE},
    {"builtins", "range", FSDP_KNOWN_RANGE},
    {"builtins", "xrange", FSDP_KNOWN_RANGE},
    {"builtins", "getattr", FSDP_KNOWN_GETATTR},
    {"functools", "partial", FSDP_KNOWN_PARTIAL},
    {"_codecs", "encode", FSDP_KNOWN_CODECS_ENCODE},
    {"collections", "OrderedDict", FSDP_KNOWN_ORDERED_DICT},
    {"collections", "defaultdict", FSDP_KNOWN_DEFAULTDICT},
    {"collections", "Counter", FSDP_KNOWN_COUNTER},
    {"collections", "deque", FSDP_KNOWN_DEQUE},
    {"datetime", "date", FSDP_KNOWN_DATETIME},
    {"datetime", "time", FSDP_KNOWN_DATETIME},
    {"datetime", "datetime", FSDP_KNOWN_DATETIME},
    {"datetime", "timedelta", FSDP_KNOWN_DATETIME},
    {"datetime", "timezone", FSDP_KNOWN_DATETIME},
    {"datetime", "tzinfo", FSDP_KNOWN_DATETIME},
    {"decimal", "Decimal", FSDP_KNOWN_DECIMAL},
    {"fractions", "Fraction", FSDP_KNOWN_FRACTION},
    {"uuid", "UUID", FSDP_KNOWN_UUID},
    {"pathlib*", "Path", FSDP_KNOWN_PATHLIB},
    {"pathlib*", "PosixPath", FSDP_KNOWN_PATHLIB},
    {"pathlib*", "WindowsPath", FSDP_KNOWN_PATHLIB},
    {"pathlib*", "PurePath", FSDP_KNOWN_PATHLIB},
    {"pathlib*", "PurePosixPath", FSDP_KNOWN_PATHLIB},
    {"pathlib*", "PureWindowsPath", FSDP_KNOWN_PATHLIB},
    {"argparse", "Namespace", FSDP_KNOWN_NAMESPACE},
    {"types", "SimpleNamespace", FSDP_KNOWN_NAMESPACE},
    {"copyreg", "_reconstructor", FSDP_KNOWN_RECONSTRUCTOR},
    {"numpy", "dtype", FSDP_KNOWN_NUMPY_DTYPE},
    {"numpy", "ndarray", FSDP_KNOWN_NUMPY_ARRAY},
    {"numpy.core.multiarray", "_reconstruct", FSDP_KNOWN_NUMPY_RECONSTRUCT},
    {"numpy._core.multiarray", "_reconstruct", FSDP_KNOWN_NUMPY_RECONSTRUCT},
    {"numpy.core.multiarray", "scalar", FSDP_KNOWN_NUMPY_SCALAR},
    {"numpy._core.multiarray", "scalar", FSDP_KNOWN_NUMPY_SCALAR},
    {"numpy.core.numeric", "_frombuffer", FSDP_KNOWN_NUMPY_FROMBUFFER},
    {"numpy._core.numeric", "_frombuffer", FSDP_KNOWN_NUMPY_FROMBUFFER},
    {"torch", "Size", FSDP_KNOWN_TORCH_SIZE},
    {"torch", "device", FSDP_KNOWN_TORCH_DEVICE},
    {"torch.serialization", "_get_layout", FSDP_KNOWN_TORCH_LAYOUT},
    {"torch.distributed.checkpoint.planner", "WriteItemType", FSDP_KNOWN_PLAN_ITEM},
    {"torch.distributed.checkpoint.planner", "LoadItemType", FSDP_KNOWN_PLAN_ITEM},
    {"torch.distributed*", "_MEM_FORMAT_ENCODING", FSDP_KNOWN_MEMORY_FORMAT},
    {"torch.distributed*", "MEM_FORMAT_ENCODING", FSDP_KNOWN_MEMORY_FORMAT},
    {"torch._utils", "_rebuild_tensor", FSDP_KNOWN_TENSOR},
    {"torch._utils", "_rebuild_tensor_v2", FSDP_KNOWN_TENSOR_V2},
    {"torch._utils", "_rebuild_tensor_v3", FSDP_KNOWN_TENSOR_V3},
    {"torch._utils", "_rebuild_parameter", FSDP_KNOWN_PARAMETER},
    {"torch._utils", "_rebuild_parameter_with_state", FSDP_KNOWN_PARAMETER_STATE},
    {"torch._utils", "_rebuild_wrapper_subclass", FSDP_KNOWN_WRAPPER_SUBCLASS},
    {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor", FSDP_KNOWN_DEVICE_TENSOR},
    {"torch._utils", "_rebuild_device_tensor_from_numpy", FSDP_KNOWN_DEVICE_TENSOR_NUMPY},
    {"torch._utils", "_rebuild_xla_tensor", FSDP_KNOWN_DEVICE_TENSOR_NUMPY},
    {"torch._utils", "_rebuild_*", FSDP_KNOWN_REBUILD_OTHER},
    {"torch.nested._internal.nested_tensor", "_rebuild_njt", FSDP_KNOWN_REBUILD_OTHER},
    {"torch._tensor", "_rebuild_from_type_v2", FSDP_KNOWN_FROM_TYPE},
    {"torch.tensor", "_rebuild_from_type_v2", FSDP_KNOWN_FROM_TYPE},
    {"torch.storage", "UntypedStorage", FSDP_KNOWN_UNTYPED_STORAGE},
    {"torch", "UntypedStorage", FSDP_KNOWN_UNTYPED_STORAGE},
    {"torch", "QInt8Storage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch", "QUInt8Storage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch", "QInt32Storage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch", "QUInt4x2Storage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch", "QUInt2x4Storage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch.storage", "TypedStorage", FSDP_KNOWN_TORCH_STORAGE},
    {"torch.nn.parameter", "Parameter", FSDP_KNOWN_PARAMETER_CLASS},
    {"torch", "Tensor", FSDP_KNOWN_TENSOR_CLASS},
    {"torch.distributed*", "DTensor", FSDP_KNOWN_DTENSOR},
    {"torch.distributed*", "ShardedTensor", FSDP_KNOWN_SHARDED_TENSOR},
    {"torch.distributed.checkpoint*", "Metadata", FSDP_KNOWN_DCP_METADATA},
    {"torch.distributed.checkpoint*", "TensorStorageMetadata", FSDP_KNOWN_DCP_TENSOR},
    {"torch.distributed.checkpoint*", "BytesStorageMetadata", FSDP_KNOWN_DCP_BYTES},
    {"torch.distributed.checkpoint*", "TensorProperties", FSDP_KNOWN_DCP_PROPERTIES},
    {"torch.distributed.checkpoint*", "ChunkStorageMetadata", FSDP_KNOWN_DCP_CHUNK},
    {"torch.distributed.checkpoint*", "MetadataIndex", FSDP_KNOWN_DCP_INDEX},
    {"torch.distributed.checkpoint*", "_StorageInfo", FSDP_KNOWN_DCP_STORAGE},
    {"torch.distributed.checkpoint*", "WriteItemType", FSDP_KNOWN_DCP_ENUM},
    {"torch.distributed.checkpoint*", "LoadItemType", FSDP_KNOWN_DCP_ENUM},
    {"torch.distributed.checkpoint*", "*", FSDP_KNOWN_DCP_OTHER},
    {"torch.distributed._shard.checkpoint*", "Metadata", FSDP_KNOWN_DCP_METADATA},
    {"torch.distributed._shard.checkpoint*", "TensorStorageMetadata", FSDP_KNOWN_DCP_TENSOR},
    {"torch.distributed._shard.checkpoint*", "BytesStorageMetadata", FSDP_KNOWN_DCP_BYTES},
    {"torch.distributed._shard.checkpoint*", "ChunkStorageMetadata", FSDP_KNOWN_DCP_CHUNK},
    {"torch.distributed._shard.checkpoint*", "MetadataIndex", FSDP_KNOWN_DCP_INDEX},
    {"torch.distributed._shard.checkpoint*", "_StorageInfo", FSDP_KNOWN_DCP_STORAGE},
    {"torch.distributed._shard*", "TensorProperties", FSDP_KNOWN_DCP_PROPERTIES},
    {"torch.distributed._shard*", "*", FSDP_KNOWN_DCP_OTHER},
};

static const uint8_t traits[FSDP_KNOWN_COUNT] = {
    [FSDP_KNOWN_SET] = PICKLE_CALLED,
    [FSDP_KNOWN_FROZENSET] = PICKLE_CALLED,
    [FSDP_KNOWN_BYTES] = PICKLE_CALLED,
    [FSDP_KNOWN_BYTEARRAY] = PICKLE_CALLED,
    [FSDP_KNOWN_COMPLEX] = PICKLE_CALLED,
    [FSDP_KNOWN_SLICE] = PICKLE_CALLED,
    [FSDP_KNOWN_RANGE] = PICKLE_CALLED,
    [FSDP_KNOWN_GETATTR] = PICKLE_IN_METADATA,
    [FSDP_KNOWN_PARTIAL] = PICKLE_TAKES_STATE,
    [FSDP_KNOWN_CODECS_ENCODE] = PICKLE_CALLED,
    [FSDP_KNOWN_ORDERED_DICT] =
        PICKLE_CALLED | PICKLE_TAKES_DICTS | PICKLE_TAKES_STATE | PICKLE_IN_METADATA,
    [FSDP_KNOWN_DEFAULTDICT] = PICKLE_CALLED | PICKLE_TAKES_DICTS | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_COUNTER] = PICKLE_CALLED | PICKLE_TAKES_DICTS | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_DEQUE] = PICKLE_CALLED | PICKLE_TAKES_LISTS | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_DATETIME] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_DECIMAL] = PICKLE_CALLED,
    [FSDP_KNOWN_FRACTION] = PICKLE_CALLED,
    [FSDP_KNOWN_UUID] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_PATHLIB] = PICKLE_CALLED | PICKLE_IN_METADATA,
    [FSDP_KNOWN_NAMESPACE] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_RECONSTRUCTOR] =
        PICKLE_CALLED | PICKLE_TAKES_LISTS | PICKLE_TAKES_DICTS | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_NUMPY_DTYPE] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_NUMPY_ARRAY] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_NUMPY_RECONSTRUCT] = PICKLE_CALLED | PICKLE_TAKES_STATE,
    [FSDP_KNOWN_NUMPY_SCALAR] = PICKLE_CALLED,
    [FSDP_KNOWN_NUMPY_FROMBUFFER] = PICKLE_CALLED,
    [FSDP_KNOWN_TORCH_SIZE] = PICKLE_CALLED | PICKLE_IN_METADATA,
    [FSDP_KNOWN_TORCH_DEVICE] = PICKLE_CALLED,
    [FSDP_KNOWN_TORCH_LAYOUT] = PICKLE_CALLED | PICKLE_IN_METADATA,
    [FSDP_KNOWN_MEMORY_FORMAT] = PICKLE_CALLED | PICKLE_IN_METADATA,
    [FSDP_KNOWN_PLAN_ITEM] = PICKLE_CALLED | PICKLE_IN_METADATA,
    [FSDP_KNOWN_TENSOR] = PICKLE_CALLED,
    [FSDP_KNOWN_TENSOR_V2] = PICKLE_CALLED,
    [FSDP_KNOWN_TENSOR_V3] = PICKLE_CALLED,
    [FSDP_KNOWN_PARAMETER] = PICKLE_CALLED,
    [FSDP_KNOWN_PARAMETER_STATE] = PICKLE_CALLED,
    [FSDP_KNOWN_WRAPPER_SUBCLASS] = PICKLE_CALLED,
    [FSDP_KNOWN_DEVICE_TENSOR] = PICKLE_CALLED,
    [FSDP_KNOWN_DEVICE_TENSOR_NUMPY] = PICKLE_CALLED,
    [FSDP_KNOWN_REBUILD_OTHER] = PICKLE_CALLED,
    [FSDP_KNOWN_FROM_TYPE] = PICKLE_CALLED,
    [FSDP_KNOWN_DCP_ENUM] = PICKLE_IN_METADATA,
};

/* Packages of Python 2 and 3, each between spaces. */
static const char standard_packages[] =
    " BaseHTTPServer Bastion CGIHTTPServer ConfigParser Cookie DocXMLRPCServer HTMLParser Queue "
    "SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO Tkinter UserDict UserList "
    "UserString __builtin__ __future__ __phello__ _abc _aix_support _ast _asyncio _bisect "
    "_blake2 _bootlocale _bootsubprocess _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 "
    "_codecs_jp _codecs_kr _codecs_tw _collections _collections_abc _compat_pickle _compression "
    "_contextvars _crypt _csv _ctypes _curses _curses_panel _datetime _dbm _decimal "
    "_dummy_thread _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm "
    "_hashlib _heapq _imp _interpchannels _interpqueues _interpreters _io _json _locale _lsprof "
    "_lzma _markupbase _md5 _msi _multibytecodec _multiprocessing _opcode _opcode_metadata "
    "_operator _osx_support _overlapped _pickle _posixshmem _posixsubprocess _py_abc "
    "_py_warnings _pydecimal _pyio _pyrepl _queue _random _remote_debugging _scproxy _sha1 "
    "_sha256 _sha3 _sha512 _signal _sitebuiltins _socket _sqlite3 _sre _ssl _stat _statistics "
    "_string _strptime _struct _symtable _testcapi _testinternalcapi _thread _threading_local "
    "_tkinter _tokenize _tracemalloc _types _typing _uuid _warnings _weakref _weakrefset _winapi "
    "_zoneinfo _zstd abc aifc annotationlib antigravity anydbm argparse array ast asynchat "
    "asyncio asyncore atexit audioop base64 bdb binascii binhex bisect builtins bz2 cPickle "
    "cProfile cStringIO calendar ce cgi cgitb chunk cmath cmd code codecs codeop collections "
    "colorsys commands compileall compression concurrent configparser contextlib contextvars "
    "cookielib copy copy_reg copyreg crypt csv ctypes curses dataclasses datetime dbhash dbm "
    "decimal difflib dis distutils dl doctest dumbdbm dummy_threading email encodings ensurepip "
    "enum errno exceptions faulthandler fcntl filecmp fileinput fnmatch formatter fpformat "
    "fractions ftplib functools gc genericpath getopt getpass gettext glob graphlib grp gzip "
    "hashlib heapq hmac html htmlentitydefs htmllib http httplib idlelib ihooks imaplib imghdr "
    "imp importlib imputil inspect io ipaddress itertools json keyword lib2to3 linecache locale "
    "logging lzma macpath mailbox mailcap marshal math md5 mimetools mimetypes mimify mmap "
    "modulefinder msilib msvcrt multifile multiprocessing mutex netrc new nis nntplib nt ntpath "
    "nturl2path numbers opcode operator optparse os os2 ossaudiodev parser pathlib pdb pickle "
    "pickletools pipes pkgutil platform plistlib popen2 poplib posix posixfile posixpath pprint "
    "profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re "
    "readline reprlib resource rexec rfc822 rlcompleter robotparser runpy sched secrets select "
    "selectors sets sgmllib sha shelve shlex shutil signal site smtpd smtplib sndhdr socket "
    "socketserver spwd sqlite3 sre sre_compile sre_constants sre_parse ssl stat statistics "
    "statvfs string stringprep struct subprocess sunau symbol symtable sys sysconfig syslog "
    "tabnanny tarfile telnetlib tempfile termios test textwrap this thread threading time timeit "
    "tkMessageBox tkinter token tokenize tomllib trace traceback tracemalloc tty turtle "
    "turtledemo types typing unicodedata unittest urllib urllib2 urlparse user uu uuid venv "
    "warnings wave weakref webbrowser whichdb winreg winsound wsgiref xdrlib xml xmlrpc "
    "xmlrpclib xxlimited xxsubtype zipapp zipfile zipimport zlib zoneinfo "
    /* names of Python 2 */
    "Dialog FileDialog ScrolledText SimpleDialog Tix Tkconstants Tkdnd _abcoll _winreg "
    "dummy_thread gdbm markupbase repr tkColorChooser tkCommonDialog tkFileDialog tkFont "
    "tkSimpleDialog ttk ";

/* --- recognising -------------------------------------------------------------------------------- */

static bool is_standard(const char *package)
{
    char spaced[80];
    snprintf(spaced, sizeof spaced, " %s ", package);
    return package[0] && strstr(standard_packages, spaced);
}

/* True when pattern "a.b*" matches a.b or a module below it, another pattern its own module. */
static bool module_matches(const char *pattern, const char *module)
{
    size_t size = strlen(pattern);
    if (pattern[size - 1] != '*')
        return strcmp(pattern, module) == 0;
    return strncmp(pattern, module, size - 1) == 0 &&
           (module[size - 1] == '\0' || module[size - 1] == '.');
}

/* A dotted name is a member of the listed global; no rule lists members. */
static bool name_matches(const char *pattern, const char *name)
{
    size_t size = strlen(pattern);
    if (pattern[size - 1] != '*')
        return strcmp(pattern, name) == 0;
    return strncmp(pattern, name, size - 1) == 0 && name[0] != '\0' && !strchr(name, '.');
}

/* The Python 3 name of a module that was renamed. */
static const char *modern_module(const char *module)
{
    if (strcmp(module, "__builtin__") == 0)
        return "builtins";
    return strcmp(module, "copy_reg") == 0 ? "copyreg" : module;
}

static fsdp_known known_dtype(const char *name, uint32_t *dtype_out)
{
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe((fsdp_dtype)i);
        *dtype_out = (uint32_t)i;
        if (info->torch && strcmp(info->torch, name) == 0)
            return FSDP_KNOWN_TORCH_DTYPE;
        if (info->torch_storage && strcmp(info->torch_storage, name) == 0)
            return FSDP_KNOWN_TORCH_STORAGE;
    }
    *dtype_out = 0;
    return FSDP_KNOWN_TORCH;
}

/* Copies the element of a dotted name, `size` bytes long; "" when it is longer than any
 * package's name. */
static void copy_element(const char *at, size_t size, char out[64])
{
    memset(out, 0, 64);
    if (size < 64)
        memcpy(out, at, size);
}

/*
 * A dotted name can reach Python through a module's imports: `config` `os.system` is os.system
 * when config imports os, and six.moves.builtins is builtins. Classes inside classes have no
 * such names.
 */
bool pickle_leads_to_python(const fsdp_pickle_global *global)
{
    static const char gates[] =
        " __builtin__ __builtins__ builtins importlib nt os posix pty runpy "
        "subprocess sys ";
    char element[64], spaced[80];
    for (const char *at = strchr(global->module, '.'); at; at = strchr(at + 1, '.')) {
        copy_element(at + 1, strcspn(at + 1, "."), element);
        snprintf(spaced, sizeof spaced, " %s ", element);
        if (element[0] && strstr(gates, spaced))
            return true;
    }
    for (const char *at = global->name; strchr(at, '.'); at = strchr(at, '.') + 1) {
        copy_element(at, strcspn(at, "."), element);
        if (is_standard(element) || strncmp(element, "__", 2) == 0 ||
            strcmp(element, "torch") == 0 || strcmp(element, "numpy") == 0)
            return true;
    }
    return false;
}

static fsdp_known known_package(const fsdp_pickle_global *global)
{
    char package[64];
    copy_element(global->module, strcspn(global->module, "."), package);
    if (pickle_leads_to_python(global))
        return FSDP_KNOWN_STANDARD;
    if (strcmp(package, "torch") == 0)
        return FSDP_KNOWN_TORCH;
    bool is_ours = strcmp(package, "numpy") == 0 || is_standard(package);
    return is_ours ? FSDP_KNOWN_STANDARD : FSDP_KNOWN_FOREIGN;
}

static const rule *find_rule(const fsdp_pickle_global *global)
{
    const char *module = modern_module(global->module);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if ((rules[i].name[0] == global->name[0] || rules[i].name[0] == '*') &&
            name_matches(rules[i].name, global->name) && module_matches(rules[i].module, module))
            return &rules[i];
    return NULL;
}

fsdp_known pickle_recognise(const fsdp_pickle_global *global, uint32_t *dtype_out)
{
    *dtype_out = 0;
    /* with a NUL, the name here would differ from the name in Python */
    if (strlen(global->module) != global->module_size || strlen(global->name) != global->name_size)
        return FSDP_KNOWN_STANDARD;
    const rule *found = find_rule(global);
    if (found)
        return found->known;
    if (strcmp(global->module, "torch") == 0 || strcmp(global->module, "torch.cuda") == 0)
        return known_dtype(global->name, dtype_out);
    return known_package(global);
}

bool pickle_is_torch(unsigned known)
{
    return known == FSDP_KNOWN_TORCH || known >= FSDP_KNOWN_TORCH_SIZE;
}

bool pickle_is_dcp(unsigned known)
{
    return known >= FSDP_KNOWN_DCP_METADATA;
}

unsigned pickle_traits(unsigned known)
{
    return traits[known];
}
