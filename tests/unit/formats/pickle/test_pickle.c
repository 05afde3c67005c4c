/* The pickle machine: what it understands, what it refuses, and that it calls nothing. */
#include "base/core/mem.h"
#include "formats/pickle/pickle.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_pickle pickle;
static fsdp_error err;

static fsdp_status parse_as(const char *bytes, size_t size, bool is_metadata)
{
    fsdp_pickle_options options = {.where = "test", .is_metadata = is_metadata};
    err = (fsdp_error){0};
    fsdp_pickle_release(&pickle);
    return fsdp_pickle_parse(&options, bytes, size, &pickle, NULL, &err);
}

/* The text of a test's pickle holds zeros: its size is that of the literal. */
#define PARSE(bytes) parse_as(bytes, sizeof(bytes) - 1, false)
#define PARSE_METADATA(bytes) parse_as(bytes, sizeof(bytes) - 1, true)

static const fsdp_pickle_node *root(void)
{
    return fsdp_pickle_at(&pickle, pickle.root);
}

static void end(void)
{
    fsdp_pickle_release(&pickle);
}

TestSuite(pickle, .fini = end);

Test(pickle, integers_of_every_width)
{
    static const struct {
        const char *bytes;
        size_t size;
        int64_t value;
    } cases[] = {
        {"K\xff.", 3, 255},
        {"M\x34\x12.", 4, 0x1234},
        {"J\xff\xff\xff\xff.", 6, -1},
        {"\x8a\x00.", 3, 0},
        {"\x8a\x01\x80.", 4, -128},
        {"\x8a\x02\x80\x00.", 5, 128},
        {"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f.", 11, INT64_MAX},
        {"\x8a\x08\0\0\0\0\0\0\0\x80.", 11, INT64_MIN},
        {"\x8a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff.", 13, -1},
        {"\x8b\x01\0\0\0\x07.", 7, 7},
        {"I-12\n.", 6, -12},
        {"L9223372036854775807L\n.", 23, INT64_MAX},
        {"L-9223372036854775808L\n.", 24, INT64_MIN},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(parse_as(cases[i].bytes, cases[i].size, false), FSDP_OK, "%zu: %s", i,
                     err.text);
        cr_expect_eq(root()->kind, FSDP_NODE_INT, "%zu", i);
        cr_expect_eq(root()->as.i64, cases[i].value, "%zu", i);
    }
}

Test(pickle, integers_beyond_64_bits_are_decimal_text)
{
    cr_assert_eq(PARSE("\x8a\x09\0\0\0\0\0\0\0\x80\0."), FSDP_OK, "%s", err.text);
    char *text = fsdp_pickle_decimal(root());
    cr_expect_str_eq(text, "9223372036854775808");
    fsdp_free(text);
    cr_assert_eq(PARSE("L-170141183460469231731687303715884105729L\n."), FSDP_OK, "%s", err.text);
    text = fsdp_pickle_decimal(root());
    cr_expect_str_eq(text, "-170141183460469231731687303715884105729");
    fsdp_free(text);
}

Test(pickle, text_of_protocol_0)
{
    cr_assert_eq(PARSE("S'a\\x41\\n\\'\\\\'\n."), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_pickle_is_text(&pickle, pickle.root, "aA\n'\\"));
    cr_assert_eq(PARSE("Vx\\u00e9\xe9\\U0001F600\n."), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_pickle_is_text(&pickle, pickle.root, "x\xc3\xa9\xc3\xa9\xf0\x9f\x98\x80"));
    cr_assert_eq(PARSE("V\n."), FSDP_OK, "an empty text: %s", err.text);
    cr_assert_eq(PARSE("F-1.5e3\n."), FSDP_OK, "%s", err.text);
    cr_expect_eq(root()->as.f64, -1500.0);
    cr_assert_eq(PARSE("(dS'k'\nI01\ns."), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_pickle_at(&pickle, fsdp_pickle_lookup(&pickle, pickle.root, "k"))->kind,
                 FSDP_NODE_BOOL);
    cr_expect_eq(PARSE("Sno quotes\n."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("F0x10\n."), FSDP_ERR_DAMAGED);
}

Test(pickle, surrogates_are_text_and_other_bytes_are_not)
{
    cr_expect_eq(PARSE("X\x03\0\0\0\xed\xa0\x80."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("X\x02\0\0\0\xc0\x80."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("U\x01\xff."), FSDP_OK, "%s", err.text);
    cr_expect_eq(root()->kind, FSDP_NODE_BYTES);
}

Test(pickle, containers_grow_and_are_shared)
{
    cr_assert_eq(PARSE("]\x94(K\1K\2K\3K\4K\5eh\0K\6ah\0\x86."), FSDP_OK, "%s", err.text);
    cr_assert_eq(root()->count, 2);
    cr_expect_eq(root()->as.items[0], root()->as.items[1]);
    const fsdp_pickle_node *list = fsdp_pickle_at(&pickle, root()->as.items[0]);
    cr_assert_eq(list->count, 6);
    cr_expect_eq(fsdp_pickle_at(&pickle, list->as.items[5])->as.i64, 6);
}

/* The n-th item of the root. */
static fsdp_node item(size_t n)
{
    return root()->as.items[n];
}

Test(pickle, what_cannot_change_is_one_node_when_it_comes_again_in_metadata)
{
    /* [300, 300, (300, 7), (300, 7), (7, 300), [7], [7], 2**20, 2**20] */
    cr_assert_eq(
        PARSE_METADATA("](M\x2c\x01M\x2c\x01M\x2c\x01K\x07\x86M\x2c\x01K\x07\x86K\x07M\x2c\x01\x86"
                       "](K\7e](K\7eJ\0\0\x10\0J\0\0\x10\0e."),
        FSDP_OK, "%s", err.text);
    cr_assert_eq(root()->count, 9);
    cr_expect_eq(item(0), item(1));
    cr_expect_eq(item(2), item(3));
    cr_expect_neq(item(3), item(4));
    cr_expect_neq(item(5), item(6), "a list may still be given items");
    cr_expect_eq(fsdp_pickle_at(&pickle, item(8))->as.i64, 1 << 20);
    /* [Size((300,)), Size((300,)), Size((7,))] */
    cr_assert_eq(
        PARSE_METADATA(
            "](ctorch\nSize\nq\0M\x2c\x01\x85\x85Rh\0M\x2c\x01\x85\x85Rh\0K\x07\x85\x85Re."),
        FSDP_OK, "%s", err.text);
    cr_expect_eq(item(0), item(1));
    cr_expect_neq(item(1), item(2));
}

/* Only what is one object in Python: constructors and attributes may be given equal ones. */
Test(pickle, elsewhere_equal_things_are_several)
{
    cr_assert_eq(PARSE("](M\x2c\x01M\x2c\x01K\7\x85K\7\x85K\7K\7e."), FSDP_OK, "%s", err.text);
    cr_expect_neq(item(0), item(1));
    cr_expect_neq(item(2), item(3));
    cr_expect_eq(item(4), item(5), "small ints are one in Python, too");
}

Test(pickle, a_size_of_what_changed_is_judged_anew)
{
    /* d = OrderedDict(); Size(d); d.a = 1; Size(d): a state may hide a method */
    cr_expect_eq(PARSE("(ctorch\nSize\nq\2ccollections\nOrderedDict\n)Rq\0\x85q\1R"
                       "h\0}X\1\0\0\0aK\1sb0t."),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("(ctorch\nSize\nq\2ccollections\nOrderedDict\n)Rq\0\x85q\1R"
                       "h\0}X\1\0\0\0aK\1sb0h\2h\1Rt."),
                 FSDP_ERR_REFUSED);
}

Test(pickle, the_memo_has_gaps)
{
    cr_assert_eq(PARSE("K\x01r\0\x20\0\0K\x02\x94j\0\x20\0\0."), FSDP_OK, "%s", err.text);
    cr_expect_eq(root()->as.i64, 1);
    cr_expect_eq(PARSE("K\x01r\0\x20\0\0j\xff\x1f\0\0."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("K\x01r\0\x20\0\0j\x01\x20\0\0."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("K\x01r\xff\xff\xff\0."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("K\x01r\0\0\0\x01."), FSDP_ERR_LIMIT);
}

Test(pickle, frames_hold_whole_opcodes)
{
    cr_expect_eq(PARSE("\x80\4\x95\2\0\0\0\0\0\0\0K\1."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("\x80\4\x95\1\0\0\0\0\0\0\0K\1."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("\x80\4\x95\x0a\0\0\0\0\0\0\0\x95\3\0\0\0\0\0\0\0K\1."), FSDP_ERR_DAMAGED);
}

Test(pickle, the_stack_is_fenced_by_marks)
{
    cr_expect_eq(PARSE("K\1(\x85."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("K\1(0."), FSDP_OK, "a mark is popped like a value: %s", err.text);
    cr_expect_eq(PARSE("K\1(a."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("K\1(."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("]K\1K\2e."), FSDP_ERR_DAMAGED);
}

Test(pickle, keys_that_can_change_are_refused)
{
    cr_expect_eq(PARSE("}]K\1s."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE("}]\x85K\1s."), FSDP_ERR_REFUSED, "a list inside a tuple");
    cr_expect_eq(PARSE("}K\1\x85K\1s."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("\x80\4\x8f(]\x90."), FSDP_ERR_REFUSED);
}

static fsdp_status call(const char *global, const char *opcode, bool is_metadata)
{
    char bytes[200];
    int size = snprintf(bytes, sizeof bytes, "c%s\n)%s.", global, opcode);
    return parse_as(bytes, (size_t)size, is_metadata);
}

Test(pickle, calls_on_the_list_are_allowed_and_others_refuse_the_file)
{
    static const struct {
        const char *global, *opcode;
        fsdp_status expected, in_metadata;
    } cases[] = {
        {"collections\nOrderedDict", "R", FSDP_OK, FSDP_OK},
        {"__builtin__\nset", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"datetime\ndatetime", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"datetime\ndatetime.now", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"pathlib._local\nPosixPath", "R", FSDP_OK, FSDP_OK},
        {"pathlib._os\nmagic_open", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"datetime\nsys", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"pathlibs\nPosixPath", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"torch._utils\n_rebuild_whatever", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"torch._utils\n_import_dotted_name", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"torch.nn\nLinear", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"torch.nn\nLinear", "\x81", FSDP_OK, FSDP_ERR_REFUSED},
        {"torchvision.x\ny", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nThing", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nThing", "\x81", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nOuter.Inner", "\x81", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nos.system", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"__main__\n__builtins__.eval", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"six.moves.builtins\neval", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"my.types\nThing", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"repr\nRepr", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"os\nsystem", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"subprocess\nPopen", "\x81", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"numpy.testing\nrundocs", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"__builtin__\neval", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"__builtin__\ngetattr", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"functools\npartial", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"torch.distributed.checkpoint.metadata\nMetadata", "\x81", FSDP_OK, FSDP_OK},
        {"torch.distributed.checkpoint.metadata\nMetadata", "R", FSDP_ERR_REFUSED,
         FSDP_ERR_REFUSED},
        {"torch.distributed.checkpoint\nload", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(call(cases[i].global, cases[i].opcode, false), cases[i].expected, "%s",
                     cases[i].global);
        cr_expect_eq(call(cases[i].global, cases[i].opcode, true), cases[i].in_metadata,
                     "%s in metadata", cases[i].global);
    }
    cr_expect_eq(call("os\nsystem", "R0N", false), FSDP_ERR_REFUSED, "under POP");
    cr_expect(strstr(err.text, "os.system") && strstr(err.text, "byte"), "%s", err.text);
}

#define GLOBAL(module, name) "c" module "\n" name "\n"
#define TEXT(size, text) "X" size "\0\0\0" text
#define SYSTEM GLOBAL("os", "system")
#define TENSOR_CLASS GLOBAL("torch", "Tensor")
#define FROM_TYPE GLOBAL("torch._tensor", "_rebuild_from_type_v2")
#define REBUILD GLOBAL("torch._utils", "_rebuild_tensor_v2")
#define PARAMETER GLOBAL("torch._utils", "_rebuild_parameter")
#define SPACE_WITH(size, name) GLOBAL("types", "SimpleNamespace") ")R}" TEXT(size, name) SYSTEM "sb"
#define MODULE_WITH(size, name) GLOBAL("torch.nn", "Module") ")\x81}" TEXT(size, name) SYSTEM "sb"

typedef struct given {
    const char *what, *bytes;
    size_t size;
} given;

#define GIVEN(what, bytes)                     \
    {                                          \
        what, bytes ".", sizeof(bytes ".") - 1 \
    }

/* Python would call os.system, or what is made of it, in all of these. */
static const given evil[] = {
    GIVEN("a function for the subclass of a tensor",
          FROM_TYPE "(" SYSTEM TENSOR_CLASS TEXT("\1", "x") "\x85}tR"),
    GIVEN("the same inside itself",
          FROM_TYPE "(" FROM_TYPE TENSOR_CLASS "(" SYSTEM TENSOR_CLASS TEXT("\1", "x") "\x85}t}tR"),
    GIVEN("a reconstructor inside", FROM_TYPE "(" GLOBAL("copyreg", "_reconstructor") TENSOR_CLASS
          "(" SYSTEM GLOBAL("builtins", "object") "Nt}tR"),
    GIVEN("set as a function of tensors",
          FROM_TYPE "(" GLOBAL("builtins", "set") TENSOR_CLASS ")}tR"),
    GIVEN("arguments that can change", FROM_TYPE "(" REBUILD TENSOR_CLASS "]}tR"),
    GIVEN("a type that is a function", FROM_TYPE "(" REBUILD SYSTEM ")}tR"),
    GIVEN("a tensor whose method is a function",
          FROM_TYPE "(" REBUILD TENSOR_CLASS ")}" TEXT("\x06", "detach") SYSTEM "stR"),
    GIVEN("a parameter with state whose method is a function",
          GLOBAL("torch._utils", "_rebuild_parameter_with_state") "(" REBUILD ")R\x89}N}" TEXT(
              "\x0b", "as_subclass") SYSTEM "s\x86tR"),
    GIVEN("a state that is no dict",
          FROM_TYPE "(" REBUILD TENSOR_CLASS ")" SPACE_WITH("\5", "items") "tR"),
    GIVEN("a parameter of no tensor", PARAMETER "(" SPACE_WITH("\6", "detach") "\x89}tR"),
    GIVEN("a parameter of a function", PARAMETER "(" SYSTEM "\x89}tR"),
    GIVEN("a parameter of an object", PARAMETER "(" MODULE_WITH("\6", "detach") "\x89}tR"),
    GIVEN("an object of Parameter with such an argument",
          GLOBAL("torch.nn.parameter", "Parameter") SPACE_WITH("\6", "detach") "\x85\x81"),
    GIVEN("a tensor for a device that is none",
          GLOBAL("torch._utils",
                 "_rebuild_device_tensor_from_cpu_tensor") "(" SPACE_WITH("\2", "to") "NN\x89tR"),
    GIVEN("sizes that are objects", REBUILD "(NK\0" MODULE_WITH("\4", "node") "\x85K\1\x85\x89}tR"),
    GIVEN("an unknown rebuild of a function",
          GLOBAL("torch._utils", "_rebuild_whatever") SYSTEM "\x85R"),
    GIVEN("an unknown rebuild of a function in a tuple",
          GLOBAL("torch._utils", "_rebuild_sparse_tensor") "N" SYSTEM "\x85\x86R"),
    GIVEN("a wrapper of a function",
          GLOBAL("torch._utils", "_rebuild_wrapper_subclass") SYSTEM "\x85R"),
    GIVEN("an object that is iterated over",
          GLOBAL("builtins", "set") MODULE_WITH("\x0a", "collate_fn") "\x85R"),
    GIVEN("an object that is iterated over, in a list of pairs",
          GLOBAL("collections", "OrderedDict") "]" MODULE_WITH("\x0a", "collate_fn") "a\x85R"),
    GIVEN("a dict of an object",
          GLOBAL("collections", "OrderedDict") SPACE_WITH("\4", "keys") "\x85R"),
    GIVEN("a dict of a dict with an attribute",
          GLOBAL("collections", "OrderedDict")
              GLOBAL("collections", "OrderedDict") ")R}" TEXT("\4", "keys") SYSTEM "sb\x85R"),
    GIVEN("a factory", GLOBAL("collections", "defaultdict") SYSTEM "\x85R"),
    GIVEN("a factory of torch",
          GLOBAL("collections", "defaultdict") GLOBAL("torch.hub", "load") "\x85R"),
    GIVEN("a fraction of an object",
          GLOBAL("fractions", "Fraction") SPACE_WITH("\x10", "as_integer_ratio") "\x85R"),
    GIVEN("a namespace that has attributes before its state",
          GLOBAL("types", "SimpleNamespace") "}" TEXT("\x0c", "__setstate__") SYSTEM "s\x85R"),
    GIVEN("items for what the state says", MODULE_WITH("\6", "append") TEXT("\1", "x") "a"),
    GIVEN("a base that is a function",
          GLOBAL("copyreg", "_reconstructor") GLOBAL("my.mod", "C") SYSTEM TEXT("\1", "x") "\x87R"),
    GIVEN("a base of torch", GLOBAL("copyreg", "_reconstructor") GLOBAL("my.mod", "C") GLOBAL(
                                 "torch.package", "PackageImporter") TEXT("\1", "x") "\x87R"),
    GIVEN("a reconstructor of a function",
          GLOBAL("copyreg", "_reconstructor") REBUILD GLOBAL("builtins", "object") "N\x87R"),
    GIVEN("a base that is a function of Python",
          GLOBAL("copyreg", "_reconstructor") GLOBAL("my.mod", "C") GLOBAL("builtins", "eval")
              TEXT("\1", "x") "\x87R"),
    GIVEN("a dict made of an object",
          GLOBAL("copyreg", "_reconstructor") GLOBAL("my.mod", "C") GLOBAL("builtins", "dict")
              SPACE_WITH("\4", "keys") "\x87R"),
    GIVEN("an array that is a function",
          GLOBAL("numpy.core.multiarray", "_reconstruct") SYSTEM "K\0\x85" TEXT("\1", "b") "\x87R"),
    GIVEN("a method of the enum",
          GLOBAL("builtins", "getattr")
              GLOBAL("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
                  TEXT("\x0e", "__subclasses__") "\x86R"),
};

Test(pickle, what_a_call_on_the_list_would_call_is_refused)
{
    for (size_t i = 0; i < sizeof evil / sizeof *evil; i++) {
        cr_expect_eq(parse_as(evil[i].bytes, evil[i].size, false), FSDP_ERR_REFUSED, "%s: %s",
                     evil[i].what, err.text);
        cr_expect(strstr(err.text, "calls") || strstr(err.text, "call something else") ||
                      strstr(err.text, "after its state"),
                  "%s: %s", evil[i].what, err.text);
    }
}

static const given honest[] = {
    GIVEN("a subclass",
          FROM_TYPE "(" REBUILD GLOBAL("my.mod", "Mine") ")}" TEXT("\5", "scale") "K\1stR"),
    GIVEN("a sharded tensor",
          FROM_TYPE "(" GLOBAL("torch._utils", "_rebuild_wrapper_subclass")
              GLOBAL("torch.distributed.tensor", "DTensor") "(" GLOBAL(
                  "torch.distributed.tensor", "DTensor") GLOBAL("torch", "float32") "t(NNNNNttR"),
    GIVEN("a parameter of a subclass",
          PARAMETER "(" FROM_TYPE "(" REBUILD GLOBAL("my.mod", "Mine") ")}tR\x89}tR"),
    GIVEN("factories", "(" GLOBAL("collections", "defaultdict") GLOBAL(
                           "__builtin__", "list") "\x85R" GLOBAL("collections", "defaultdict")
                           GLOBAL("builtins", "dict") "\x85R" GLOBAL("collections", "defaultdict")
                               GLOBAL("collections", "OrderedDict") "\x85R" GLOBAL(
                                   "collections", "defaultdict") GLOBAL("my.mod", "f") "\x85Rt"),
    GIVEN("a dict of pairs", GLOBAL("collections", "OrderedDict") "]]K\1aK\2aa\x85R"),
    GIVEN("old objects",
          "(" GLOBAL("copy_reg", "_reconstructor") GLOBAL("my.mod", "C")
              GLOBAL("__builtin__", "object") "N\x87R}b" GLOBAL("copy_reg", "_reconstructor")
                  GLOBAL("my.mod", "L") GLOBAL("__builtin__",
                                               "list") "]\x87R" GLOBAL("copy_reg", "_reconstructor")
                      GLOBAL("argparse", "Namespace") GLOBAL("__builtin__", "object") "N\x87R}bt"),
    GIVEN("a time with its zone", GLOBAL("datetime", "datetime") GLOBAL("pytz", "_UTC") ")R\x85R"),
    GIVEN("a quantized tensor",
          GLOBAL("torch._utils", "_rebuild_qtensor") "(NK\0K\1\x85K\1\x85(" GLOBAL(
              "torch", "per_tensor_affine") "K\1K\0t\x89}tR"),
};

Test(pickle, what_python_writes_for_such_calls_is_taken)
{
    for (size_t i = 0; i < sizeof honest / sizeof *honest; i++)
        cr_expect_eq(parse_as(honest[i].bytes, honest[i].size, false), FSDP_OK, "%s: %s",
                     honest[i].what, err.text);
}

/* Python looks for the whole name, so a name must not end at a NUL here. */
Test(pickle, a_global_is_known_by_its_whole_name)
{
    cr_expect_eq(PARSE("ccollections\nOrderedDict\0x\n)R."), FSDP_ERR_REFUSED, "%s", err.text);
    cr_expect_eq(PARSE("ccollections\0x\nOrderedDict\n)R."), FSDP_ERR_REFUSED, "%s", err.text);
    cr_expect_eq(PARSE("\x8c\013collections\x8c\015OrderedDict\0x\x93)R."), FSDP_ERR_REFUSED, "%s",
                 err.text);
    cr_expect_eq(PARSE_METADATA("ccollections\nOrderedDict\0x\n)R."), FSDP_ERR_REFUSED, "%s",
                 err.text);
}

Test(pickle, metadata_holds_the_classes_of_dcp_only)
{
    static const given refused[] = {
        GIVEN("a class of a tensor",
              GLOBAL("builtins", "getattr")
                  GLOBAL("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
                      TEXT("\x11", "ProcessGroupState") "\x86R"),
        GIVEN("a tensor", FROM_TYPE "(" REBUILD TENSOR_CLASS ")}tR"),
        GIVEN("a set", GLOBAL("builtins", "set") "]\x85R"),
        GIVEN("a partial", GLOBAL("functools", "partial") ")R"),
        GIVEN("under POP", SYSTEM ")R0N"),
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        cr_expect_eq(parse_as(refused[i].bytes, refused[i].size, true), FSDP_ERR_REFUSED, "%s",
                     refused[i].what);
    cr_expect_eq(PARSE_METADATA(GLOBAL("torch", "Size") "K\1\x85\x85R."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE_METADATA(GLOBAL("builtins", "getattr") GLOBAL(
                     "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
                                    TEXT("\x17", "TORCH_CONTIGUOUS_FORMAT") "\x86R."),
                 FSDP_OK, "%s", err.text);
}

Test(pickle, a_global_alone_is_only_a_name)
{
    cr_assert_eq(PARSE("cos\nsystem\n."), FSDP_OK, "%s", err.text);
    char *name = fsdp_pickle_global_name(&pickle, pickle.root);
    cr_expect_str_eq(name, "os.system");
    fsdp_free(name);
}

#define NEW_OF(name) "c__builtin__\ngetattr\n(cmy.mod\n" name "\nX\x07\0\0\0__new__tR\x94"
#define PARTIAL_OF(name) "cfunctools\npartial\n" NEW_OF(name) "\x85R"

Test(pickle, an_object_made_by_partial_is_one_shape)
{
    cr_expect_eq(PARSE(PARTIAL_OF("C") "(h\0(cmy.mod\nC\nK\1t}NtB"), FSDP_ERR_DAMAGED, "cut");
    cr_assert_eq(PARSE(PARTIAL_OF("C") "(h\0(cmy.mod\nC\nK\7t}Ntb)R."), FSDP_OK, "%s", err.text);
    cr_assert_eq(root()->kind, FSDP_NODE_CALL);
    cr_expect(root()->flags & FSDP_NODE_OPAQUE);
    cr_expect_eq(fsdp_pickle_at(&pickle, fsdp_pickle_argument(&pickle, root(), 0))->as.i64, 7);
    cr_expect_eq(PARSE(PARTIAL_OF("C") "(h\0(cmy.mod\nD\nK\1t}Ntb)R."), FSDP_ERR_REFUSED,
                 "of another class");
    cr_expect_eq(PARSE(PARTIAL_OF("C") "(h\0(cmy.mod\nC\nK\1t}Ntb."), FSDP_ERR_REFUSED,
                 "not called");
    cr_expect_eq(PARSE(PARTIAL_OF("C") ")R."), FSDP_ERR_REFUSED, "without a state");
    cr_expect_eq(PARSE(NEW_OF("C") "."), FSDP_ERR_REFUSED, "getattr alone");
}

Test(pickle, getattr_of_sharded_tensor_is_a_class)
{
    static const char shape[] =
        "c__builtin__\ngetattr\nctorch.distributed._shard.sharded_tensor.api\n"
        "ShardedTensor\nX\x11\0\0\0ProcessGroupState\x86R)\x81}b.";
    cr_expect_eq(PARSE(shape), FSDP_OK, "%s", err.text);
    static const char with_default[] =
        "c__builtin__\ngetattr\nctorch.distributed._shard.sharded_tensor.api\n"
        "ShardedTensor\nX\x11\0\0\0ProcessGroupStateN\x87R)\x81}b.";
    cr_expect_eq(PARSE(with_default), FSDP_ERR_REFUSED, "%s", err.text);
    cr_expect_eq(PARSE("c__builtin__\ngetattr\ncos\nX\nX\x06\0\0\0system\x86R."), FSDP_ERR_REFUSED);
}

Test(pickle, getattr_of_a_zero_stage_is_its_number)
{
#define STAGE_OF(module, name) \
    "c__builtin__\ngetattr\nc" module "\nZeroStageEnum\nX\x09\0\0\0" name "\x86R."
    cr_expect_eq(PARSE(STAGE_OF("deepspeed.runtime.zero.config", "gradients")), FSDP_OK, "%s",
                 err.text);
    const fsdp_pickle_node *call = fsdp_pickle_at(&pickle, pickle.root);
    int64_t stage = 0;
    cr_assert_eq(call->kind, FSDP_NODE_CALL);
    cr_expect(fsdp_pickle_int(&pickle, fsdp_pickle_argument(&pickle, call, 0), &stage));
    cr_expect_eq(stage, 2);
    cr_expect_eq(PARSE(STAGE_OF("deepspeed.runtime.zero.config", "__class__")), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE(STAGE_OF("other.config", "gradients")), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_METADATA(STAGE_OF("deepspeed.runtime.zero.config", "gradients")),
                 FSDP_ERR_REFUSED);
}

Test(pickle, items_and_states_go_only_to_what_takes_them)
{
    cr_expect_eq(PARSE("ccollections\nOrderedDict\n)RK\1K\2s}b."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("ccollections\nOrderedDict\n)RK\1a."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE("ctorch._utils\n_rebuild_tensor_v2\n)RK\1K\2s."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE("ctorch._utils\n_rebuild_tensor_v2\n)R}b."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE("cmy.mod\nC\n)\x81K\1K\2sK\1a}b."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE("cmy.mod\nC\n)\x81}b}b."), FSDP_ERR_REFUSED, "two states");
}

Test(pickle, metadata_has_no_storages)
{
    cr_expect_eq(PARSE("K\1Q."), FSDP_OK, "%s", err.text);
    cr_expect_eq(PARSE_METADATA("K\1Q."), FSDP_ERR_REFUSED);
}

Test(pickle, running_out_of_memory_is_an_error)
{
    static const char bytes[] =
        PARTIAL_OF("C") "(h\0(cmy.mod\nC\nK\7t}Ntb)R\x94(K\1](K\1K\2K\3e}K\1\x8a\1\x99st.";
    cr_assert_eq(PARSE(bytes), FSDP_OK, "%s", err.text);
    for (int64_t n = 0;; n++) {
        fsdp_pickle_release(&pickle);
        fsdp_mem_fail_after(n, false);
        fsdp_status st = PARSE(bytes);
        fsdp_mem_fail_after(-1, false);
        if (st == FSDP_OK)
            break;
        cr_assert_eq(st, FSDP_ERR_LIMIT, "allocation %lld: %s", (long long)n, err.text);
    }
}

/* --- containers that are made of their items ------------------------------------------------------ */

#define ORDERED_DICT "ccollections\nOrderedDict\n"
#define DEFAULTDICT "ccollections\ndefaultdict\n"
#define PAIR(key, value) "](X\1\0\0\0" key "K" value "e"

static const fsdp_pickle_node *dict_items(void)
{
    return fsdp_pickle_at(&pickle, fsdp_pickle_dict_items(&pickle, root()));
}

static int64_t number_at(const fsdp_pickle_node *items, size_t i)
{
    int64_t number = -1;
    fsdp_pickle_int(&pickle, items->as.items[i], &number);
    return number;
}

Test(pickle, a_dict_of_pairs_has_them_as_items)
{
    cr_assert_eq(PARSE("\x80\2" ORDERED_DICT "](" PAIR("a", "\1") PAIR("b", "\2") "e\x85R."),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(dict_items()->count, 4);
    cr_expect(fsdp_pickle_is_text(&pickle, dict_items()->as.items[2], "b"));
    cr_expect_eq(number_at(dict_items(), 3), 2);
    cr_expect_eq(fsdp_pickle_argument(&pickle, root(), 0), 0, "the list was moved");
    cr_assert_eq(PARSE("\x80\2" DEFAULTDICT "c__builtin__\nlist\n](" PAIR("a", "\1") "e\x86R."),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(dict_items()->count, 2);
    cr_expect_neq(fsdp_pickle_argument(&pickle, root(), 0), 0, "the factory stays");
}

Test(pickle, a_dict_of_a_dict_and_of_items_has_both)
{
    cr_assert_eq(PARSE("\x80\2" ORDERED_DICT "}(X\1\0\0\0aK\1u\x85R(X\1\0\0\0bK\2u."), FSDP_OK,
                 "%s", err.text);
    cr_assert_eq(dict_items()->count, 4);
    cr_expect_eq(number_at(dict_items(), 1), 1);
    cr_expect_eq(number_at(dict_items(), 3), 2);
}

Test(pickle, a_deque_of_a_list_has_its_items)
{
    cr_assert_eq(PARSE("\x80\2ccollections\ndeque\n](K\1K\2eK\5\x86R."), FSDP_OK, "%s", err.text);
    const fsdp_pickle_node *items =
        fsdp_pickle_at(&pickle, fsdp_pickle_list_items(&pickle, root()));
    cr_assert_eq(items->count, 2);
    cr_expect_eq(number_at(items, 1), 2);
    int64_t most = 0;
    cr_expect(fsdp_pickle_int(&pickle, fsdp_pickle_argument(&pickle, root(), 1), &most));
    cr_expect_eq(most, 5);
}

Test(pickle, a_dict_made_of_what_holds_no_pairs_is_damaged)
{
    cr_expect_eq(PARSE("\x80\2" ORDERED_DICT "](](K\1ee\x85R."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("\x80\2" ORDERED_DICT "](](K\1K\2K\3ee\x85R."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("\x80\2" ORDERED_DICT "K\1\x85R."), FSDP_ERR_DAMAGED);
    cr_expect_eq(PARSE("\x80\2ccollections\nCounter\n](" PAIR("a", "\1") "e\x85R."),
                 FSDP_ERR_DAMAGED);
}

Test(pickle, of_equal_keys_the_first_key_and_the_last_value_stay)
{
    /* {1: 1, 1.0: 2, True: 3, "1": 4, "1": 5, (1, 2): 6, (1.0, 2): 7, b"1": 8} */
    cr_assert_eq(PARSE("\x80\2}(K\1K\1G\x3f\xf0\0\0\0\0\0\0K\2\x88K\3X\1\0\0\0001K\4"
                       "X\1\0\0\0001K\5K\1K\2\x86K\6G\x3f\xf0\0\0\0\0\0\0K\2\x86K\7C\0011K\10u."),
                 FSDP_OK, "%s", err.text);
    const fsdp_pickle_node *items = root();
    cr_assert_eq(items->count, 8);
    cr_expect_eq(number_at(items, 0), 1);
    cr_expect_eq(number_at(items, 1), 3);
    cr_expect_eq(number_at(items, 3), 5);
    cr_expect_eq(number_at(items, 5), 7);
    cr_expect_eq(number_at(items, 7), 8);
    /* {nan: 1, nan: 2} */
    cr_assert_eq(PARSE("\x80\2}(G\x7f\xf8\0\0\0\0\0\0K\1G\x7f\xf8\0\0\0\0\0\0K\2u."), FSDP_OK, "%s",
                 err.text);
    cr_expect_eq(root()->count, 4);
}

/* One list of 1,000 items, given to a deque 5,000 times: 150 KB would become 5 million items. */
Test(pickle, a_list_cannot_be_copied_without_bound)
{
    enum { ITEMS = 1000, CALLS = 5000 };
    static const char deque[] = "ccollections\ndeque\nh\1\x85R0";
    const size_t call = sizeof deque - 1;
    char *bytes = malloc(8 + 2 * ITEMS + CALLS * call + 2), *to = bytes;
    cr_assert(bytes);
    memcpy(to, "\x80\2]q\1(", 6);
    to += 6;
    for (int i = 0; i < ITEMS; i++, to += 2)
        memcpy(to, "K\1", 2);
    *to++ = 'e';
    for (int i = 0; i < CALLS; i++, to += call)
        memcpy(to, deque, call);
    *to++ = '.';
    cr_expect_eq(parse_as(bytes, (size_t)(to - bytes), false), FSDP_ERR_REFUSED, "%s", err.text);
    fsdp_pickle_release(&pickle);
    free(bytes);
}

/* --- classes of modules in the legacy form of torch.save ------------------------------------------- */

static fsdp_status parse_module(const char *bytes, size_t size, bool is_legacy)
{
    fsdp_pickle_options options = {.where = "test", .is_legacy = is_legacy};
    err = (fsdp_error){0};
    fsdp_pickle_release(&pickle);
    return fsdp_pickle_parse(&options, bytes, size, &pickle, NULL, &err);
}

#define PARSE_LEGACY(bytes) parse_module(bytes, sizeof(bytes) - 1, true)
#define MODULE "X\x06\0\0\0module"

Test(pickle, a_persistent_id_of_a_module_is_its_class)
{
    static const char id[] = "(" MODULE "cnets\nNet\nX\x01\0\0\0fU\x02\x61\xfftQ)\x81.";
    cr_assert_eq(PARSE_LEGACY(id), FSDP_OK, "%s", err.text);
    cr_expect_eq(root()->kind, FSDP_NODE_CALL);
    cr_expect_str_eq(fsdp_pickle_at(&pickle, root()->as.call->callable)->as.global->name, "Net");
    cr_expect(fsdp_pickle_is_code(&pickle, pickle.root));
    cr_assert_eq(PARSE_LEGACY("(" MODULE "cnets\nNet\nNNtQ."), FSDP_OK, "%s", err.text);
    cr_expect_eq(root()->kind, FSDP_NODE_GLOBAL);
    cr_expect_eq(parse_module(id, sizeof id - 1, false), FSDP_ERR_REFUSED, "not a zip's");
}

Test(pickle, another_persistent_id_is_no_class)
{
    cr_expect_eq(PARSE_LEGACY("(" MODULE "cnets\nNet\nNtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("(" MODULE "cnets\nNet\nNNNtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("(" MODULE MODULE "NNtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("(" MODULE "cnets\nNet\n}NtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("(X\x06\0\0\0modulocnets\nNet\nNNtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("(" MODULE "csubprocess\nPopen\nNNtQ)\x81."), FSDP_ERR_REFUSED);
    cr_expect_eq(PARSE_LEGACY("]" MODULE "aQ)\x81."), FSDP_ERR_REFUSED);
}
