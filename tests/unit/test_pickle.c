/* The pickle machine: what it understands, what it refuses, and that it calls nothing. */
#include "base/mem.h"
#include "formats/pickle.h"

#include <criterion/criterion.h>
#include <stdio.h>
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
        {"__builtin__\nset", "R", FSDP_OK, FSDP_OK},
        {"datetime\ndatetime", "R", FSDP_OK, FSDP_OK},
        {"datetime\ndatetime.now", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"pathlib._local\nPosixPath", "R", FSDP_OK, FSDP_OK},
        {"pathlibs\nPosixPath", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"torch._utils\n_rebuild_whatever", "R", FSDP_OK, FSDP_OK},
        {"torch._utils\n_import_dotted_name", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"torch.nn\nLinear", "R", FSDP_ERR_REFUSED, FSDP_ERR_REFUSED},
        {"torch.nn\nLinear", "\x81", FSDP_OK, FSDP_ERR_REFUSED},
        {"torchvision.x\ny", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nThing", "R", FSDP_OK, FSDP_ERR_REFUSED},
        {"my.module\nThing", "\x81", FSDP_OK, FSDP_ERR_REFUSED},
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

Test(pickle, a_global_alone_is_only_a_name)
{
    cr_assert_eq(PARSE("cos\nsystem\n."), FSDP_OK, "%s", err.text);
    char *name = fsdp_pickle_spell(&pickle, pickle.root);
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
    cr_expect_eq(PARSE("c__builtin__\ngetattr\ncos\nX\nX\x06\0\0\0system\x86R."), FSDP_ERR_REFUSED);
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
