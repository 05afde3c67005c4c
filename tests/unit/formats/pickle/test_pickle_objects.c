/* Objects of unknown classes: what they may hold, and which parts of a pickle are code. */
#include "formats/pickle/pickle.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static fsdp_pickle pickle;
static fsdp_error err;

static fsdp_status parse(const char *bytes, size_t size)
{
    err = (fsdp_error){0};
    fsdp_pickle_release(&pickle);
    return fsdp_pickle_parse(&(fsdp_pickle_options){.where = "test"}, bytes, size, &pickle, NULL,
                             &err);
}

/* The text of a test's pickle holds zeros: its size is that of the literal. */
#define PARSE(bytes) parse(bytes, sizeof(bytes) - 1)

static void end(void)
{
    fsdp_pickle_release(&pickle);
}

TestSuite(pickle_objects, .fini = end);

#define WRAPPER "ctorch.utils.data.datapipes.datapipe\n_IterDataPipeSerializationWrapper\n)\x81"
#define SHELL "cos\nsystem\n(S'x'\ntR." /* 20 bytes */
#define SHELL_BYTES "C\x14" SHELL

Test(pickle_objects, a_pickle_in_an_object_is_checked_as_its_calls_are)
{
    cr_expect_eq(PARSE(WRAPPER SHELL_BYTES "b."), FSDP_ERR_REFUSED, "the state");
    cr_expect(strstr(err.text, "calls os.system"), "%s", err.text);
    cr_expect(strstr(err.text, "bytes in an object"), "%s", err.text);
    cr_expect_eq(PARSE(WRAPPER "}K\1(" SHELL_BYTES "tsb."), FSDP_ERR_REFUSED, "deep in the state");
    cr_expect_eq(PARSE("cmy.mod\nloads\n" SHELL_BYTES "\x85R."), FSDP_ERR_REFUSED, "an argument");
    cr_expect_eq(PARSE("cmy.mod\nL\n)\x81" SHELL_BYTES "a."), FSDP_ERR_REFUSED, "an item");
    cr_expect_eq(PARSE("cmy.mod\nL\n)\x81U\x14" SHELL "b0N."), FSDP_ERR_REFUSED,
                 "not in the result");
    cr_expect_eq(PARSE(WRAPPER "C\x0d"
                               "cmy.mod\nC\n)\x81.b."),
                 FSDP_OK, "%s", err.text);
}

/* Protocol 2 has no bytes: they are a text whose characters are the bytes. */
Test(pickle_objects, a_pickle_in_a_text_of_bytes_is_checked)
{
    cr_expect_eq(PARSE(WRAPPER "c_codecs\nencode\n"
                               "X\x14\0\0\0"
                               "\xc2\x8c\2os\xc2\x8c\6system\xc2\x93)R\n."
                               "\x8c\6latin1\x86Rb."),
                 FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "calls os.system"), "%s", err.text);
}

Test(pickle_objects, other_bytes_in_an_object_are_data)
{
    static const struct {
        const char *bytes;
        size_t size;
    } cases[] = {{"\x82\1\n.", 4}, {"\x97\n..", 4}, {"\x98\n..", 4},   {"\x80\x09\n.", 4},
                 {"NNb\n.", 5},    {"text\n.", 6},  {"\n\3a.b\n.", 7}, {"cos\nsystem\n.", 12},
                 {"\x80\2", 2},    {".", 1}};
    char pickle_bytes[200];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int size =
            snprintf(pickle_bytes, sizeof pickle_bytes, "%sC%c", WRAPPER, (char)cases[i].size);
        memcpy(pickle_bytes + size, cases[i].bytes, cases[i].size);
        memcpy(pickle_bytes + (size_t)size + cases[i].size, "b.", 2);
        cr_expect_eq(parse(pickle_bytes, (size_t)size + cases[i].size + 2), FSDP_OK, "%zu: %s", i,
                     err.text);
    }
    cr_expect_eq(PARSE(SHELL_BYTES "."), FSDP_OK, "bytes outside objects are never loaded");
}

Test(pickle_objects, pickles_nest_to_a_bound)
{
    char nested[400] = "N\n.", outer[400];
    size_t size = 3;
    for (int depth = 1; depth <= 6; depth++) {
        int head = snprintf(outer, sizeof outer,
                            "cmy.mod\nC\n)\x81"
                            "C%c",
                            (char)size);
        memcpy(outer + head, nested, size);
        memcpy(outer + (size_t)head + size, "b.", 2);
        size += (size_t)head + 2;
        memcpy(nested, outer, size);
        cr_expect_eq(parse(nested, size), depth <= 4 ? FSDP_OK : FSDP_ERR_REFUSED, "%d: %s", depth,
                     err.text);
    }
}

Test(pickle_objects, an_object_gets_no_function_that_runs_its_arguments)
{
    static const char *const refused[] = {
        "cos\nsystem\n",        "cposix\nsystem\n",     "c__builtin__\neval\n",
        "cbuiltins\ngetattr\n", "csubprocess\nPopen\n", "cpickle\nloads\n",
        "cconfig\nos.system\n", "ctorch\nload\n",       "ctorch.storage\n_load_from_bytes\n",
        "cnumpy\nload\n"};
    static const char *const fine[] = {"ctyping\nAny\n",
                                       "c__builtin__\ndict\n",
                                       "cbuiltins\nlen\n",
                                       "cmath\nsqrt\n",
                                       "cmy.mod\nf\n",
                                       "ctorch\nfloat32\n",
                                       "ctorch.nn.functional\nrelu\n",
                                       "cmy.mod\nload\n"};
    char bytes[200];
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        int size = snprintf(bytes, sizeof bytes, "cmy.mod\nC\n)\x81}K\1%ssb.", refused[i]);
        cr_expect_eq(parse(bytes, (size_t)size), FSDP_ERR_REFUSED, "%s", refused[i]);
        size = snprintf(bytes, sizeof bytes, "cmy.mod\nf\n(%stR.", refused[i]);
        cr_expect_eq(parse(bytes, (size_t)size), FSDP_ERR_REFUSED, "%s", refused[i]);
    }
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        int size = snprintf(bytes, sizeof bytes, "cmy.mod\nC\n)\x81}K\1%ssb.", fine[i]);
        cr_expect_eq(parse(bytes, (size_t)size), FSDP_OK, "%s", err.text);
    }
    cr_expect_eq(PARSE("cmy.mod\nC\n)\x81\x94}K\1h\0sb."), FSDP_OK, "a cycle: %s", err.text);
}

/* Containers and calls on the list, which the state of an object may hold. */
Test(pickle_objects, an_object_is_searched_at_every_depth)
{
    static const struct {
        const char *before, *after, *what;
    } states[] = {{"", "\x85", "a tuple"},
                  {"]", "a", "a list"},
                  {"}", "K\1s", "a key of a dict"},
                  {"}", "\x85K\1s", "a tuple that is a key"},
                  {"}K\1", "s", "a value of a dict"},
                  {"\x8f(", "\x90", "a set"},
                  {"(", "\x91", "a frozenset"},
                  {"ccollections\nOrderedDict\n)RK\1", "s", "an item of a call"},
                  {"ccollections\nOrderedDict\n)R}K\1", "sb", "the state of a call"},
                  {"ccollections\ndeque\n(](", "et\x85R", "an argument of a call"},
                  {"cmy.mod\nD\n)\x81}K\1", "sb", "an object in an object"}};
    char bytes[200];
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        int size = snprintf(bytes, sizeof bytes, "cmy.mod\nC\n)\x81}K\1%scos\nsystem\n%ssb.",
                            states[i].before, states[i].after);
        cr_expect_eq(parse(bytes, (size_t)size), FSDP_ERR_REFUSED, "%s: %s", states[i].what,
                     err.text);
        cr_expect(strstr(err.text, "an object gets os.system"), "%s: %s", states[i].what, err.text);
        size = snprintf(bytes, sizeof bytes, "cmy.mod\nC\n)\x81}K\1%scmath\nsqrt\n%ssb.",
                        states[i].before, states[i].after);
        cr_expect_eq(parse(bytes, (size_t)size), FSDP_OK, "%s: %s", states[i].what, err.text);
    }
    cr_expect_eq(PARSE(WRAPPER "\x96\x14\0\0\0\0\0\0\0" SHELL "b."), FSDP_ERR_REFUSED,
                 "a bytearray");
}

static bool holds_code(const char *bytes, size_t size)
{
    cr_assert_eq(parse(bytes, size), FSDP_OK, "%s", err.text);
    bool is_code = false;
    for (size_t i = 0; i < pickle.count; i++)
        is_code |= fsdp_pickle_is_code(&pickle, (fsdp_node)i);
    return is_code;
}

#define HOLDS_CODE(bytes) holds_code(bytes, sizeof(bytes) - 1)

Test(pickle_objects, code_is_what_the_policy_does_not_list)
{
    cr_expect(HOLDS_CODE("cmy.mod\nC\n)\x81."), "an object");
    cr_expect(HOLDS_CODE("csympy\nsympify\n(S'x'\ntR."), "a call");
    cr_expect(HOLDS_CODE("cmy.mod\nC\n."), "a class, whose module is imported");
    cr_expect(HOLDS_CODE("cos\nsystem\n."), "a function of Python's library");
    cr_expect(HOLDS_CODE("cmy.mod\nC\n)\x81"
                         "0N."),
              "an object that is thrown away");
    cr_expect(HOLDS_CODE("ctorch.nn.modules.linear\nLinear\n)\x81}b."), "a module of PyTorch");
    cr_expect(HOLDS_CODE(WRAPPER "N."), "a wrapper");
    cr_expect(HOLDS_CODE("ccopy_reg\n_reconstructor\n(cmy.mod\nC\nc__builtin__\nobject\nNtR."));
    cr_expect(HOLDS_CODE("ccollections\ndefaultdict\n(cmy.mod\nC\ntR."), "a factory");
    cr_expect_not(HOLDS_CODE("ccollections\nOrderedDict\n)R."));
    cr_expect_not(HOLDS_CODE("ccollections\ndefaultdict\n(c__builtin__\nlist\ntR."));
    cr_expect_not(HOLDS_CODE("c__builtin__\nint\n."));
    cr_expect_not(HOLDS_CODE("cnumpy\nfloat32\n."));
    cr_expect_not(HOLDS_CODE("ctorch\nfloat32\n."));
    cr_expect_not(HOLDS_CODE("cargparse\nNamespace\n)\x81}b."));
    cr_expect_not(HOLDS_CODE("ctorch.distributed.tensor.placement_types\nShard\n)\x81}b."));
    cr_expect_not(
        HOLDS_CODE("ctorch.distributed.fsdp._flat_param\nFlatParamShardMetadata\n)\x81."));
    cr_expect(HOLDS_CODE("ctorch.distributed.fsdpx\nC\n)\x81."), "another module");
}
