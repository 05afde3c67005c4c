/*
 * Maps: messages of the parser, each step in both directions beside a plain computation, names, sizes, and
 * what a checkpoint may lack.
 */
#include "statedict/map/map_rules.h"
#include "statedict/sd/layout_internal.h"
#include "tests/unit/statedict/derive/stored_tensors.h"

/* --- the parser ---------------------------------------------------------------------------------- */

static void expect_refused(const char *text, const char *words)
{
    fsdp_map *map = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_map_parse(text, strlen(text), "x.map", &map, &err);
    cr_expect_eq(st, FSDP_ERR_USAGE, "%s", text);
    cr_expect(strstr(err.text, words), "'%s' lacks '%s'", err.text, words);
    if (st == FSDP_OK)
        fsdp_map_free(map);
}

Test(map, the_parser_names_the_line)
{
    expect_refused("", "line 0: a map has at least one rule");
    expect_refused("a = b\n\n    + c\n  flatten 0 2\n", "line 4: a rule ends with its right side");
    expect_refused("# a\na\n", "line 2: the last rule has no right side");
    expect_refused("a\nb = c\n", "line 2: the rule before has no right side");
    expect_refused("a\ndrop left c\n", "line 2: the rule before has no right side");
    expect_refused("  unstack 0 {x}\n", "line 1: an indented line belongs to a rule");
    expect_refused("a\n  turn 0 1\n  = b\n", "line 2: there is no such step");
    expect_refused("a\n  split 0\n  + b\n", "line 3: names of the left side come before the steps");
    expect_refused("a\n  =\n", "line 2: a rule has a name on its right side");
    expect_refused("= b\n", "line 1: a rule has a name on its left side");
    expect_refused("a.{b = c\n", "line 1: a '{' without '}'");
    expect_refused("a.{} = c\n", "line 1: a variable has no name");
    expect_refused("a.{x:} = c\n", "line 1: a variable has no words");
    expect_refused("{a}{b}{c}{d}{e}{f}{g}{h}{i}{j}{k} = c\n",
                   "line 1: there are too many variables");
    expect_refused("size a\n", "line 1: a size is: size NAME = SOURCE");
    expect_refused("keep all\n", "line 1: tensors that no rule takes stay by: keep others");
    expect_refused("frame a = b\n", "line 1: a frame is: frame LEFT*NAME = RIGHT*NAME");
    expect_refused("a = b\nframe a* = b*\n", "line 2: frames come before the rules");
    expect_refused("a = b\nunstacked a = b\n", "line 2: unstacked names come before the rules");
    expect_refused("drop both a\n", "line 1: names are left out by");
    expect_refused("tied a\n", "line 1: names of tied tensors are: tied left NAME");
    expect_refused("left a b\n", "line 1: a side is");
    expect_refused("words a = \n", "line 1: words of a variable are: words NAME = WORD|WORD");
    expect_refused("values a = b\n", "line 1: names of values are: values LEFT* = RIGHT*");
    expect_refused("values a.* = b\n", "line 1: names of values are: values LEFT* = RIGHT*");
    expect_refused("values a*b = c*\n", "line 1: names of values are: values LEFT* = RIGHT*");
    expect_refused("numbered a b\n", "line 1: names that numbers count are: numbered NAME");
    expect_refused("numbered a.{x\n", "line 1: a '{' without '}'");
    expect_refused("a.{x}\n  first {x}\n  = b\n", "line 3: 'first', 'number' and a 'gather'");
}

Test(map, arguments_of_steps_are_checked)
{
    static const char *const wrong[] = {"unstack {x} 0",
                                        "unstack 0 x",
                                        "unstack 0",
                                        "unstack -1 {x}",
                                        "unstack 64 {x}",
                                        "scatter 0 {x}",
                                        "unflatten 0",
                                        "flatten 0",
                                        "flatten 0 : 2",
                                        "split 0 : 2 2",
                                        "unpad 0 2",
                                        "transpose 0",
                                        "permute",
                                        "permute 0 x",
                                        "permute 0 0",
                                        "permute 1 2",
                                        "permute 0 63",
                                        "reshape 2 3",
                                        "reshape : 2",
                                        "reshape 2:3",
                                        "scale 0",
                                        "scale x",
                                        "scale inf",
                                        "scale nan",
                                        "scale 1e-320",
                                        "scale",
                                        "reshape 2 : 3 : 4",
                                        "first 0",
                                        "number {x}",
                                        "number {x} {y}",
                                        "number {x} {y} z",
                                        "number {z} {x} {x}",
                                        "number {z} {x} {y} {z}"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[64];
        snprintf(text, sizeof text, "a\n  %s\n  = b\n", wrong[i]);
        expect_refused(text, "line 2: the step has other arguments");
    }
    expect_refused("size n = 1\nsize n = 2\na = b\n", "line 2: the size is here twice");
    expect_refused("a\n  transpose 0 1 2\n  = b\n", "line 2: the step has too many arguments");
    expect_refused("a\n  log 2\n  = b\n", "line 2: the step has too many arguments");
}

Test(map, a_text_of_many_rules_and_frames_is_refused)
{
    fsdp_text text = {0};
    fsdp_map *map = NULL;
    fsdp_error err = {0};
    fsdp_text_addf(&text, "frame x.* = y.*\n");
    for (int i = 0; i < 2100; i++)
        fsdp_text_addf(&text, "a = b\n");
    cr_assert_eq(fsdp_map_parse(text.data, text.size, "x.map", &map, &err), FSDP_ERR_LIMIT);
    cr_expect(strstr(err.text, "more than 4096 rules"), "%s", err.text);
    fsdp_text_release(&text);
}

/* --- applying ------------------------------------------------------------------------------------- */

/* Numbers from 0 on. */
static const float numbers[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};

static stored_tensor tensor(const char *name, int64_t rows, int64_t columns, int first)
{
    return (stored_tensor){name, FSDP_F32, columns ? 2 : 1, {rows, columns}, numbers + first};
}

static fsdp_map *parse(const char *text)
{
    fsdp_map *map = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_map_parse(text, strlen(text), "x.map", &map, &err), FSDP_OK, "%s", err.text);
    return map;
}

static fsdp_status apply_with(const fsdp_map_call *call, const char *text, bool from_right,
                              fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    fsdp_map *map = parse(text);
    fsdp_status st = fsdp_map_apply(map, from_right, call, checkpoint, err);
    fsdp_map_free(map);
    return st;
}

static const fsdp_map_call plain_call = {.config = NULL};

static fsdp_checkpoint *apply(const char *text, bool from_right, fsdp_checkpoint *checkpoint)
{
    fsdp_error err = {0};
    cr_assert_eq(apply_with(&plain_call, text, from_right, &checkpoint, &err), FSDP_OK, "%s\n%s",
                 text, err.text);
    return checkpoint;
}

static void expect_failure(const fsdp_map_call *call, const char *text, fsdp_checkpoint *checkpoint,
                           const char *words)
{
    fsdp_error err = {0};
    fsdp_status st = apply_with(call, text, false, &checkpoint, &err);
    cr_expect_neq(st, FSDP_OK, "%s", text);
    cr_expect_null(checkpoint);
    cr_expect(strstr(err.text, words), "'%s' lacks '%s'", err.text, words);
}

/* "[2, 3] 0 1 2 3 4 5" */
static void show(fsdp_checkpoint *checkpoint, const char *name, char *out, size_t room)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    float data[64];
    fsdp_error err = {0};
    size_t at = 0;
    if (entry < 0) {
        snprintf(out, room, "none");
        return;
    }
    entry = (int64_t)fsdp_sd_tensor_of(sd, (size_t)entry);
    const fsdp_entry *of = fsdp_sd_at(sd, (size_t)entry);
    const fsdp_box whole = fsdp_box_whole(of->ndim, of->shape);
    cr_assert_leq(fsdp_box_count(&whole), 64);
    cr_assert_eq(
        fsdp_checkpoint_read(checkpoint, (size_t)entry, &whole, data, FSDP_CHECK_OFF, &err),
        FSDP_OK, "%s", err.text);
    for (int d = 0; d < of->ndim; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%d", d ? "x" : "", (int)of->shape[d]);
    at += (size_t)snprintf(out + at, room - at, ":");
    for (int64_t i = 0; i < fsdp_box_count(&whole); i++)
        at += (size_t)snprintf(out + at, room - at, " %g", (double)data[i]);
}

static void expect_tensor(fsdp_checkpoint *checkpoint, const char *name, const char *wanted)
{
    char shown[512];
    show(checkpoint, name, shown, sizeof shown);
    cr_expect_str_eq(shown, wanted, "'%s' is %s, not %s", name, shown, wanted);
}

/* The map takes the tensor "a" to "b", and back to what it was. */
static void expect_step(const char *steps, stored_tensor a, const char *b)
{
    char text[256], was[512];
    snprintf(text, sizeof text, "a\n%s\n  = b\n", steps);
    fsdp_checkpoint *checkpoint = stored_open(&a, 1);
    show(checkpoint, "a", was, sizeof was);
    checkpoint = apply(text, false, checkpoint);
    expect_tensor(checkpoint, "b", b);
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "a", was);
    fsdp_checkpoint_close(checkpoint);
}

Test(map, each_step_of_one_tensor_in_both_directions)
{
    const stored_tensor a = tensor("a", 2, 6, 0), one = tensor("a", 6, 0, 0);
    expect_step("", a, "2x6: 0 1 2 3 4 5 6 7 8 9 10 11");
    expect_step("  unflatten 1 2 3", a, "2x2x3: 0 1 2 3 4 5 6 7 8 9 10 11");
    expect_step("  unflatten 0 _ 3", one, "2x3: 0 1 2 3 4 5");
    expect_step("  flatten 0 2 6", a, "12: 0 1 2 3 4 5 6 7 8 9 10 11");
    expect_step("  flatten 0 _ 6", a, "12: 0 1 2 3 4 5 6 7 8 9 10 11");
    expect_step("  pad 0 6 8", one, "8: 0 1 2 3 4 5 0 0");
    expect_step("  pad 1 6 up(6,4)", a, "2x8: 0 1 2 3 4 5 0 0 6 7 8 9 10 11 0 0");
    expect_step("  transpose 0 1", a, "6x2: 0 6 1 7 2 8 3 9 4 10 5 11");
    expect_step("  unflatten 1 2 3\n  permute 2 0 1", a, "3x2x2: 0 3 6 9 1 4 7 10 2 5 8 11");
    expect_step("  reshape 2 6 : 3 4", a, "3x4: 0 1 2 3 4 5 6 7 8 9 10 11");
    expect_step("  reshape 6 : 2 3", one, "2x3: 0 1 2 3 4 5");
    expect_step("  scale 0.5", one, "6: 0 0.5 1 1.5 2 2.5");
    expect_step("  add -0.5", one, "6: -0.5 0.5 1.5 2.5 3.5 4.5");
    expect_step("  exp", one, "6: 1 2.71828 7.38906 20.0855 54.5981 148.413");
    expect_step("  add 1\n  log\n  scale -1", tensor("a", 3, 0, 0), "3: -0 -0.693147 -1.09861");
    expect_step("  transpose 0 1\n  scale 2\n  unflatten 0 3 2", a,
                "3x2x2: 0 12 2 14 4 16 6 18 8 20 10 22");
}

/* The padding is cut off on the way to the right, and zeros take its place on the way back. */
Test(map, rows_behind_the_size_are_cut_off)
{
    const stored_tensor a = tensor("a", 6, 0, 0);
    fsdp_checkpoint *checkpoint = stored_open(&a, 1);
    checkpoint = apply("a\n  unpad 0 4 6\n  = b\n", false, checkpoint);
    expect_tensor(checkpoint, "b", "4: 0 1 2 3");
    checkpoint = apply("a\n  unpad 0 4 6\n  = b\n", true, checkpoint);
    expect_tensor(checkpoint, "a", "6: 0 1 2 3 0 0");
    fsdp_checkpoint_close(checkpoint);
    /* as many zeros as fill it, whatever the size was said to be */
    checkpoint = apply("a\n  pad 0 4 9\n  = b\n", false, stored_open(&a, 1));
    expect_tensor(checkpoint, "b", "9: 0 1 2 3 4 5 0 0 0");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, steps_of_several_tensors_in_both_directions)
{
    const stored_tensor a = tensor("a", 4, 3, 0);
    static const struct {
        const char *text, *names[3], *wanted[3];
    } cases[] = {{"a\n  unstack 0 {x}\n  = b.{x}\n",
                  {"b.0", "b.3", "b.4"},
                  {"3: 0 1 2", "3: 9 10 11", "none"}},
                 {"a\n  unstack 1 {x}\n  = b.{x}\n",
                  {"b.0", "b.2", "b.3"},
                  {"4: 0 3 6 9", "4: 2 5 8 11", "none"}},
                 {"a\n  scatter 0 {x} 2\n  = b.{x}\n",
                  {"b.0", "b.1", "b.2"},
                  {"2x3: 0 1 2 3 4 5", "2x3: 6 7 8 9 10 11", "none"}},
                 {"a\n  scatter 0 {x} 2\n  = b.{x:up|down}\n",
                  {"b.up", "b.down", "b.0"},
                  {"2x3: 0 1 2 3 4 5", "2x3: 6 7 8 9 10 11", "none"}},
                 {"a\n  split 0\n  = b\n  + c\n",
                  {"b", "c", "a"},
                  {"2x3: 0 1 2 3 4 5", "2x3: 6 7 8 9 10 11", "none"}},
                 {"a\n  split 1 1 2\n  = b c\n",
                  {"b", "c", "a"},
                  {"4x1: 0 3 6 9", "4x2: 1 2 4 5 7 8 10 11", "none"}},
                 {"a\n  unstack 0 {x}\n  unstack 0 {y}\n  = b.{y}.{x}\n",
                  {"b.0.0", "b.2.3", "b.3.2"},
                  {": 0", ": 11", "none"}},
                 {"a\n  unstack 0 {x}\n  split 0 1 2\n  scale 2\n  = b.{x}\n  + c.{x}\n",
                  {"b.1", "c.1", "c.4"},
                  {"1: 6", "2: 8 10", "none"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_checkpoint *checkpoint = apply(cases[i].text, false, stored_open(&a, 1));
        for (int k = 0; k < 3; k++)
            expect_tensor(checkpoint, cases[i].names[k], cases[i].wanted[k]);
        checkpoint = apply(cases[i].text, true, checkpoint);
        expect_tensor(checkpoint, "a", "4x3: 0 1 2 3 4 5 6 7 8 9 10 11");
        cr_expect_eq(fsdp_sd_count(fsdp_checkpoint_sd(checkpoint)), 1);
        fsdp_checkpoint_close(checkpoint);
    }
}

Test(map, steps_of_one_of_several_names_in_both_directions)
{
    const stored_tensor stored[] = {tensor("k", 3, 2, 0), tensor("v", 1, 3, 6)};
    const char *text = "k\n  + v\n  only 1 transpose 0 1\n  only 2 scale 2\n  concat 0\n  = kv\n";
    fsdp_checkpoint *checkpoint = apply(text, false, stored_open(stored, 2));
    expect_tensor(checkpoint, "kv", "3x3: 0 2 4 1 3 5 12 14 16");
    text = "k\n  + v\n  only 1 transpose 0 1\n  only 2 scale 2\n  concat 0 2 1\n  = kv\n";
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "k", "3x2: 0 1 2 3 4 5");
    expect_tensor(checkpoint, "v", "1x3: 6 7 8");
    fsdp_checkpoint_close(checkpoint);
    text = "k\n  + v\n  only 2 log\n  = k\n  + v\n";
    checkpoint = apply(text, false, stored_open(stored, 2));
    expect_tensor(checkpoint, "k", "3x2: 0 1 2 3 4 5");
    expect_tensor(checkpoint, "v", "1x3: 1.79176 1.94591 2.07944");
    fsdp_checkpoint_close(checkpoint);
    expect_refused("a\n  only 0 scale 2\n  = b\n", "line 2: a step for one of several names is");
    expect_refused("a\n  only 1 split 0\n  = b c\n", "line 2: the step takes or makes several");
    expect_refused("a\n  only 1 halve\n  = b\n", "line 2: there is no such step");
}

Test(map, stacks_of_experts_in_both_directions)
{
    const stored_tensor stored[] = {tensor("m.0.e.0.a", 2, 1, 0),  tensor("m.0.e.1.a", 2, 1, 2),
                                    tensor("m.1.e.0.a", 2, 1, 4),  tensor("m.1.e.1.a", 2, 1, 6),
                                    tensor("m.0.e.0.b", 2, 1, 8),  tensor("m.0.e.1.b", 2, 1, 10),
                                    tensor("m.1.e.0.b", 2, 1, 12), tensor("m.1.e.1.b", 2, 1, 14)};
    const char *text = "m.{l}.e.{x}.a\n  + m.{l}.e.{x}.b\n  concat 1\n  stack 0 {x}\n  = n.{l}\n";
    fsdp_checkpoint *checkpoint = apply(text, false, stored_open(stored, 8));
    expect_tensor(checkpoint, "n.0", "2x2x2: 0 8 1 9 2 10 3 11");
    expect_tensor(checkpoint, "n.1", "2x2x2: 4 12 5 13 6 14 7 15");
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "m.1.e.0.b", "2x1: 12 13");
    cr_expect_eq(fsdp_sd_count(fsdp_checkpoint_sd(checkpoint)), 8);
    fsdp_checkpoint_close(checkpoint);
}

/* The rules of a Mamba 2: its numbers lie in columns, decays are stored as they are, norms in groups. */
Test(map, a_state_of_gguf_in_both_directions)
{
    static const float decays[] = {-1, -2};
    static const char *const given[] = {"groups=2"};
    const fsdp_map_call call = {.given = given, .given_count = 1};
    const stored_tensor stored[] = {{"blk.0.ssm_a", FSDP_F32, 2, {2, 1}, decays},
                                    tensor("blk.0.ssm_d", 2, 1, 4),
                                    tensor("blk.0.ssm_conv1d.weight", 3, 2, 6),
                                    tensor("blk.0.ssm_norm.weight", 2, 3, 0)};
    fsdp_checkpoint *checkpoint = stored_open(stored, 4);
    fsdp_map *map = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_map_builtin("gguf-mamba2", &map, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_map_apply(map, false, &call, &checkpoint, &err), FSDP_OK, "%s", err.text);
    expect_tensor(checkpoint, "backbone.layers.0.mixer.A_log", "2: 0 0.693147");
    expect_tensor(checkpoint, "backbone.layers.0.mixer.D", "2: 4 5");
    expect_tensor(checkpoint, "backbone.layers.0.mixer.conv1d.weight", "3x1x2: 6 7 8 9 10 11");
    expect_tensor(checkpoint, "backbone.layers.0.mixer.norm.weight", "6: 0 1 2 3 4 5");
    cr_assert_eq(fsdp_map_apply(map, true, &call, &checkpoint, &err), FSDP_OK, "%s", err.text);
    expect_tensor(checkpoint, "blk.0.ssm_a", "2x1: -1 -2");
    expect_tensor(checkpoint, "blk.0.ssm_d", "2x1: 4 5");
    expect_tensor(checkpoint, "blk.0.ssm_conv1d.weight", "3x2: 6 7 8 9 10 11");
    expect_tensor(checkpoint, "blk.0.ssm_norm.weight", "2x3: 0 1 2 3 4 5");
    fsdp_checkpoint_close(checkpoint);
    fsdp_map_free(map);
}

/* --- names ---------------------------------------------------------------------------------------- */

Test(map, frames_hold_every_rule_again)
{
    const stored_tensor stored[] = {tensor("a", 2, 0, 0), tensor("opt.m.a", 2, 0, 2),
                                    tensor("opt.v.a", 2, 0, 4)};
    const char *text =
        "frame opt.{k:m|v}.* = state.*.{k:exp_avg|exp_avg_sq}\na\n  pad 0 2 3\n  = b\n";
    fsdp_checkpoint *checkpoint = apply(text, false, stored_open(stored, 3));
    expect_tensor(checkpoint, "b", "3: 0 1 0");
    expect_tensor(checkpoint, "state.b.exp_avg", "3: 2 3 0");
    expect_tensor(checkpoint, "state.b.exp_avg_sq", "3: 4 5 0");
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "opt.v.a", "2: 4 5");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, a_rule_that_unstacks_takes_a_tensor_per_row_too)
{
    const stored_tensor stored[] = {tensor("d.0.a", 1, 2, 0), tensor("d.1.a", 1, 2, 2)};
    const char *text = "unstacked d. = d.{l}.\nd.a\n  unstack 0 {l}\n  transpose 0 1\n  = e.{l}\n";
    fsdp_checkpoint *checkpoint = apply(text, false, stored_open(stored, 2));
    expect_tensor(checkpoint, "e.1", "2x1: 2 3");
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "d.a", "2x1x2: 0 1 2 3");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, directions_drops_and_what_is_kept)
{
    const stored_tensor stored[] = {tensor("a", 2, 0, 0), tensor("b", 2, 0, 2),
                                    tensor("c", 2, 0, 4)};
    const char *text = "drop left b x{n}\nkeep others\na > y\nq < z\n";
    fsdp_checkpoint *checkpoint = apply(text, false, stored_open(stored, 3));
    expect_tensor(checkpoint, "y", "2: 0 1");
    expect_tensor(checkpoint, "b", "none");
    expect_tensor(checkpoint, "c", "2: 4 5");
    checkpoint = apply(text, true, checkpoint);
    expect_tensor(checkpoint, "y", "2: 0 1");
    expect_tensor(checkpoint, "a", "none");
    fsdp_checkpoint_close(checkpoint);
}

static fsdp_entry_kind kind_of(const fsdp_checkpoint *checkpoint, const char *name)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    cr_assert_geq(entry, 0, "%s", name);
    return fsdp_sd_at(sd, (size_t)entry)->kind;
}

/* A tensor w with the names w and v becomes x and y. */
static fsdp_checkpoint *apply_tied(const fsdp_map_call *call, const char *text)
{
    const stored_tensor stored[] = {tensor("w", 2, 2, 0), tensor("other", 2, 2, 0)};
    fsdp_error err = {0};
    fsdp_checkpoint *checkpoint = stored_open_tied(stored, 2, "v");
    cr_assert_eq(apply_with(call, text, false, &checkpoint, &err), FSDP_OK, "%s", err.text);
    return checkpoint;
}

Test(map, names_of_one_tensor_stay_its_names)
{
#define PADDED \
    "w\n  transpose 0 1\n  pad 0 2 3\n  = x\nv\n  transpose 0 1\n  pad 0 2 3\n  = y\nother\n"
    fsdp_checkpoint *checkpoint =
        apply_tied(&plain_call, PADDED "  transpose 0 1\n  pad 0 2 3\n  = z\n");
    cr_expect_eq(kind_of(checkpoint, "x"), FSDP_ENTRY_TENSOR);
    cr_expect_eq(kind_of(checkpoint, "y"), FSDP_ENTRY_ALIAS);
    cr_expect_eq(kind_of(checkpoint, "z"), FSDP_ENTRY_TENSOR); /* equal, and not the same */
    expect_tensor(checkpoint, "y", "3x2: 0 2 1 3 0 0");
    checkpoint =
        apply("x\n  unpad 0 2 3\n  = w\ny\n  unpad 0 2 3\n  = v\nkeep others\n", false, checkpoint);
    cr_expect_eq(kind_of(checkpoint, "v"), FSDP_ENTRY_ALIAS);
    expect_tensor(checkpoint, "v", "2x2: 0 2 1 3");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, names_that_other_steps_lead_to_are_tensors)
{
    static const char *const texts[] = {
        "w = x\nv\n  transpose 0 1\n  = y\n",
        "w\n  pad 0 2 3\n  = x\nv\n  pad 0 2 4\n  = y\n",
        "w\n  scale 2\n  = x\nv\n  scale 3\n  = y\n",
        "w\n  exp\n  = x\nv\n  log\n  = y\n",
        "w\n  scale 2\n  transpose 0 1\n  = x\nv\n  scale 3\n  transpose 0 1\n  = y\n",
        "w\n  reshape 2 2 : 1 4\n  = x\nv\n  reshape 2 2 : 4 1\n  = y\n",
        "w\n  unflatten 0 1 2\n  = x\nv\n  unflatten 0 2 1\n  = y\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        fsdp_text text = {0};
        fsdp_text_addf(&text, "keep others\n%s", texts[i]);
        fsdp_checkpoint *checkpoint = apply_tied(&plain_call, text.data);
        cr_expect_eq(kind_of(checkpoint, "y"), FSDP_ENTRY_TENSOR, "%s", texts[i]);
        fsdp_checkpoint_close(checkpoint);
        fsdp_text_release(&text);
    }
}

Test(map, a_side_may_lack_a_tied_name)
{
    const char *text = "tied right y\ntied left w\nw = x\nv = y\nother = z\n";
    const fsdp_map_call all = {.keeps_tied = true};
    fsdp_checkpoint *checkpoint = apply_tied(&plain_call, text);
    expect_tensor(checkpoint, "x", "2x2: 0 1 2 3");
    expect_tensor(checkpoint, "y", "none");
    fsdp_checkpoint_close(checkpoint);
    checkpoint = apply_tied(&all, text);
    cr_expect_eq(kind_of(checkpoint, "y"), FSDP_ENTRY_ALIAS);
    fsdp_checkpoint_close(checkpoint);
    checkpoint = apply_tied(&plain_call, "tied right z\nw = x\nv = y\nother = z\n");
    expect_tensor(checkpoint, "z", "2x2: 0 1 2 3"); /* it is not tied */
    fsdp_checkpoint_close(checkpoint);
}

/* The first rule that takes a tensor counts. */
Test(map, the_first_rule_takes_a_tensor)
{
    const stored_tensor stored[] = {tensor("w.1", 2, 0, 0), tensor("w.2", 2, 0, 2)};
    fsdp_checkpoint *checkpoint =
        apply("w.1 > first\nw.{x} > other.{x}\n", false, stored_open(stored, 2));
    expect_tensor(checkpoint, "first", "2: 0 1");
    expect_tensor(checkpoint, "other.1", "none");
    expect_tensor(checkpoint, "other.2", "2: 2 3");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, numbers_in_names_have_no_leading_zeros_and_repeat)
{
    const stored_tensor stored[] = {tensor("w.01", 2, 0, 0), tensor("w.0.1", 2, 0, 2),
                                    tensor("w.7.7", 2, 0, 4)};
    fsdp_checkpoint *checkpoint = apply("keep others\nw.{x}.{x} > same.{x}\nw.{x} > one.{x}\n",
                                        false, stored_open(stored, 3));
    expect_tensor(checkpoint, "w.01", "2: 0 1");
    expect_tensor(checkpoint, "w.0.1", "2: 2 3");
    expect_tensor(checkpoint, "same.7", "2: 4 5");
    fsdp_checkpoint_close(checkpoint);
}

/* Stages of a pipeline: 0 has a norm and an MLP, then an MLP; 1 has a norm alone. */
static const char *const stages[] = {"p0.l0.norm", "p0.l0.mlp", "p0.l1.mlp", "p1.l0.norm"};

Test(map, numbers_count_the_names_of_their_rule)
{
    const stored_tensor stored[] = {tensor(stages[0], 1, 0, 0), tensor(stages[1], 1, 0, 1),
                                    tensor(stages[2], 1, 0, 2), tensor(stages[3], 1, 0, 3)};
    fsdp_checkpoint *checkpoint =
        apply("p{p}.l{l}.{kind:norm|mlp}\n  number {layer} {p} {l}\n  > {kind:norm|mlp}.{layer}\n",
              false, stored_open(stored, 4));
    expect_tensor(checkpoint, "norm.0", "1: 0");
    expect_tensor(checkpoint, "norm.1", "1: 3");
    expect_tensor(checkpoint, "mlp.1", "1: 2");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, numbers_count_all_names_of_a_form)
{
    const stored_tensor stored[] = {tensor(stages[0], 1, 0, 0), tensor(stages[1], 1, 0, 1),
                                    tensor(stages[2], 1, 0, 2), tensor(stages[3], 1, 0, 3)};
    fsdp_checkpoint *checkpoint =
        apply("words kind = norm|mlp\nnumbered p{p}.l{l}.{rest:*}\n"
              "p{p}.l{l}.{kind}\n  number {layer} {p} {l}\n  > {kind}.{layer}\n",
              false, stored_open(stored, 4));
    expect_tensor(checkpoint, "norm.0", "1: 0");
    expect_tensor(checkpoint, "norm.1", "none");
    expect_tensor(checkpoint, "norm.2", "1: 3");
    expect_tensor(checkpoint, "mlp.1", "1: 2");
    fsdp_checkpoint_close(checkpoint);
}

/* The order is that of the step, not that of the name: all of chunk 0 come before chunk 1. */
Test(map, numbers_count_in_the_order_of_their_variables)
{
    const stored_tensor stored[] = {tensor("p0.c0.l0", 1, 0, 0), tensor("p0.c1.l0", 1, 0, 1),
                                    tensor("p1.c0.l0", 1, 0, 2), tensor("p1.c0.l1", 1, 0, 3),
                                    tensor("p1.c1.l0", 1, 0, 4)};
    fsdp_checkpoint *checkpoint =
        apply("p{p}.c{c}.l{l}\n  number {n} {c} {p} {l}\n  stack 0 {n}\n  flatten 0 _ 1\n  > all\n",
              false, stored_open(stored, 5));
    expect_tensor(checkpoint, "all", "5: 0 2 3 1 4");
    fsdp_checkpoint_close(checkpoint);
}

Test(map, the_first_tensor_is_that_of_the_lowest_number)
{
    const stored_tensor stored[] = {tensor("p3.a", 1, 0, 0), tensor("p70.a", 1, 0, 1),
                                    tensor("p90.b", 1, 0, 2), tensor("p80.b", 1, 0, 3)};
    fsdp_checkpoint *checkpoint =
        apply("words which = a|b\np{p}.{which}\n  first {p}\n  > {which}\n", false,
              stored_open(stored, 4));
    expect_tensor(checkpoint, "a", "1: 0");
    expect_tensor(checkpoint, "b", "1: 3");
    cr_expect_eq(fsdp_sd_count(fsdp_checkpoint_sd(checkpoint)), 2);
    fsdp_checkpoint_close(checkpoint);
}

Test(map, all_of_a_name_up_to_its_end)
{
    const stored_tensor stored[] = {tensor("a.b.extra", 1, 0, 0), tensor("a.c.weight", 1, 0, 1)};
    fsdp_checkpoint *checkpoint =
        apply("drop left a.{rest:*}.extra\na.{kind:b|c}.weight = {kind:b|c}\n", false,
              stored_open(stored, 2));
    expect_tensor(checkpoint, "c", "1: 1");
    cr_expect_eq(fsdp_sd_count(fsdp_checkpoint_sd(checkpoint)), 1);
    fsdp_checkpoint_close(checkpoint);
}

static void add_number(fsdp_checkpoint *checkpoint, const char *name, int64_t number)
{
    const fsdp_value value = {.kind = FSDP_VALUE_I64, .as.i64 = number};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_sd_add_value(checkpoint->manifest.sd, name, strlen(name), &value, &err),
                 FSDP_OK);
}

static int64_t number_of(fsdp_checkpoint *checkpoint, const char *name)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    return entry < 0 ? -1 : fsdp_sd_at(sd, (size_t)entry)->value.as.i64;
}

Test(map, values_get_the_names_of_the_other_side)
{
    const stored_tensor stored = tensor("a", 1, 0, 0);
    const char *text = "values r0.args.* = common.*\nvalues r0.step* = step*\na = b\n";
    fsdp_checkpoint *checkpoint = stored_open(&stored, 1);
    add_number(checkpoint, "r0.args.x", 1);
    add_number(checkpoint, "r0.step", 2);
    add_number(checkpoint, "r1.args.x", 3);
    checkpoint = apply(text, false, checkpoint);
    cr_expect_eq(number_of(checkpoint, "common.x"), 1);
    cr_expect_eq(number_of(checkpoint, "step"), 2);
    cr_expect_eq(number_of(checkpoint, "r1.args.x"), -1);
    checkpoint = apply(text, true, checkpoint);
    cr_expect_eq(number_of(checkpoint, "r0.args.x"), 1);
    fsdp_checkpoint_close(checkpoint);
}

/* --- sizes ------------------------------------------------------------------------------------------ */

static void expect_rows(const fsdp_map_call *call, const char *size, int64_t rows)
{
    const stored_tensor stored = tensor("a", 24, 0, 0);
    char text[200], wanted[512];
    fsdp_checkpoint *checkpoint = stored_open(&stored, 1);
    fsdp_error err = {0};
    int at = snprintf(wanted, sizeof wanted, "%d:", (int)rows);
    for (int i = 0; i < rows; i++)
        at += snprintf(wanted + at, sizeof wanted - (size_t)at, " %d", i);
    const fsdp_value value = {.kind = FSDP_VALUE_I64, .as.i64 = 12};
    cr_assert_eq(fsdp_sd_add_value(checkpoint->manifest.sd, "args.n", 6, &value, &err), FSDP_OK);
    snprintf(
        text, sizeof text,
        "size both = nowhere+1 | (nowhere | n\nsize seen = args.n\na\n  unpad 0 %s 24\n  = b\n",
        size);
    cr_assert_eq(apply_with(call, text, false, &checkpoint, &err), FSDP_OK, "%s: %s", size,
                 err.text);
    expect_tensor(checkpoint, "b", wanted);
    fsdp_checkpoint_close(checkpoint);
}

static fsdp_map_call call_of(const char *config, const char *const *given, size_t count)
{
    static fsdp_config_file files[4];
    static size_t used;
    cr_assert_lt(used, sizeof files / sizeof *files);
    fsdp_config_file *file = &files[used++];
    cr_assert_eq(fsdp_config_parse(config, strlen(config), NULL, file, NULL), FSDP_OK);
    return (fsdp_map_call){.config = file, .given = given, .given_count = count};
}

Test(map, sizes_are_expressions_over_numbers_from_three_places)
{
    static const char *const given[] = {"n=5", "many=6"};
    const fsdp_map_call config = call_of(
        "{\"n\":7,\"real\":1.5,\"flag\":true,\"text_config\":{\"deep\":9,\"n\":1}}", NULL, 0);
    const fsdp_map_call user = call_of("{\"n\":7}", given, 2);
    const fsdp_map_call both = call_of("{\"args.n\":14,\"n\":7}", NULL, 0);
    expect_rows(&config, "2*3+4", 10);
    expect_rows(&config, "2+3*4", 14);
    expect_rows(&config, "(2+3)*4-1", 19);
    expect_rows(&config, "17/5%2", 1);
    expect_rows(&config, "up(9,4)", 12);
    expect_rows(&config, "up(8,4)+up(up(1,2),3)", 11);
    expect_rows(&config, "both", 7);
    expect_rows(&config, "seen", 12);
    expect_rows(&config, "args.n/2", 6);
    expect_rows(&both, "args.n/2", 6); /* what the checkpoint says goes before its config.json */
    expect_rows(&both, "n", 7);
    expect_rows(&config, "dim(a,0)/3", 8);
    expect_rows(&config, "deep+flag", 10);
    expect_rows(&user, "both", 5);
    expect_rows(&user, "many", 6);
}

Test(map, sizes_that_are_not_known_or_no_sizes)
{
    static const struct {
        const char *size, *words;
    } cases[] = {
        {"nothing", "the number 'nothing' is unknown; give it with --size nothing=NUMBER"},
        {"lost", "the size 'lost' is unknown"},
        {"round", "the size 'round' is unknown"},
        {"real", "the number 'real' is unknown"},
        {"2-3", "'2-3' is -1, which is not a size"},
        {"2/0", "a division by a number that is not positive"},
        {"(2", "a ')' is missing"},
        {"2)", "the expression does not end"},
        {"2+", "a number is missing"},
        {"up(2)", "a ',' is missing"},
        {"dim(a)", "a ',' is missing"},
        {"dim(a,x", "a ')' is missing"},
        {"dim(a,1)", "there is no tensor 'a' with dim 1"},
        {"dim(b,0)", "there is no tensor 'b' with dim 0"},
        {"up(2,0)", "cannot be rounded up"},
        {"99999999999999999999", "the number is too large"},
        {"999999999999*999999999999", "a product is too large"},
        {"0-(0-9223372036854775807-1)", "too large"},
        {"((((((((((((((((((1))))))))))))))))))", "too many parentheses"},
        {"up(up(up(up(up(up(up(up(up(up(up(up(up(up(up(up(up(up(1,2", "too many parentheses"},
        {"big", "the size 'big' is unknown"}};
    const fsdp_map_call call = call_of("{\"real\":1.5}", NULL, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const stored_tensor stored = tensor("a", 24, 0, 0);
        char text[600];
        snprintf(
            text, sizeof text,
            "size lost = nowhere | real\nsize round = round\nsize b1 = b2|b2|b2\nsize b2 = "
            "b3|b3|b3\n"
            "size b3 = b4|b4|b4\nsize b4 = b5|b5|b5\nsize b5 = b6|b6|b6\nsize b6 = b7|b7|b7\n"
            "size b7 = b8|b8|b8\nsize b8 = b9|b9|b9\nsize b9 = b10|b10|b10\nsize b10 = b11|b11\n"
            "size b11 = b12|b12|b12\nsize b12 = b13|b13|b13|b13|b13\nsize b13 = nowhere\nsize big "
            "= b1\n"
            "a\n  unpad 0 %s 24\n  = b\n",
            cases[i].size);
        expect_failure(&call, text, stored_open(&stored, 1), cases[i].words);
    }
}

/* Computed anew at each place, the last one would need 3^59 of the first. */
Test(map, sizes_of_sizes_are_computed_once)
{
    const stored_tensor stored = tensor("a", 24, 0, 0);
    fsdp_text text = {0};
    fsdp_text_addf(&text, "size s0 = 3\n");
    for (int i = 1; i < 60; i++)
        fsdp_text_addf(&text, "size s%d = s%d+s%d-s%d\n", i, i - 1, i - 1, i - 1);
    fsdp_text_addf(&text, "a\n  unpad 0 s59 24\n  = b\n");
    fsdp_checkpoint *checkpoint = apply(text.data, false, stored_open(&stored, 1));
    expect_tensor(checkpoint, "b", "3: 0 1 2");
    fsdp_checkpoint_close(checkpoint);
    fsdp_text_release(&text);
}

/* The variable {y} has numbers behind the first unstack, and none behind the stack. */
Test(map, a_join_of_nothing_is_refused)
{
    const stored_tensor stored[] = {tensor("a.0", 2, 3, 0), tensor("a.1", 2, 3, 6)};
    expect_failure(&plain_call,
                   "a.{x}\n  unstack 0 {y}\n  stack 0 {x}\n  unstack 0 {y}\n  stack 0 {y}\n"
                   "  scale 2\n  = c.{x}\n",
                   stored_open(stored, 2), "nothing to join");
}

/* --- what a checkpoint lacks, or has too much ------------------------------------------------------- */

Test(map, tensors_that_are_missing_or_too_many_are_named)
{
    const stored_tensor stored[] = {tensor("a.0", 2, 3, 0), tensor("a.2", 2, 3, 6),
                                    tensor("b.0", 3, 0, 0), tensor("c", 3, 2, 0),
                                    tensor("d", 12, 0, 0)};
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"keep others\na.{x}\n  stack 0 {x}\n  = n\n",
         "x.map, line 2, 'a.{x}': number 1 of {x} is missing"},
        {"keep others\nb.{x}\n  + d.{x}\n  concat 0\n  = n\n", "the tensor 'd.0' is missing"},
        {"a.{x} = n.{x}\n", "no rule of the map 'x' takes 'b.0', 'c', 'd'; leave out what is not "
                            "needed with --drop REGEX"},
        {"keep others\na.{x} = n\n", "'n'"},
        {"keep others\na.{x} = n.{y}\n", "line 2, 'a.{x}': a variable of 'n.{y}' has no value"},
        {"keep others\na.{x} = n.{x:p|q}\n", "a variable of 'n.{x:p|q}' has no value"},
        {"keep others\nc\n  stack 0 {x}\n  = n\n", "no name has {x}, whose tensors become one"},
        {"keep others\nc\n  split 0 2 2\n  = n\n  + m\n",
         "dim 0 of [3, 2] does not have the 4 rows of its parts"},
        {"keep others\nc\n  split 0 1 1\n  = n\n  + m\n",
         "dim 0 of [3, 2] does not have the 2 rows of its parts"},
        {"keep others\nd\n  unflatten 0 2 3\n  = n\n",
         "a dim of 12 does not have the sizes of its parts, 6 together"},
        {"keep others\nc\n  split 0 9223372036854775807 9223372036854775807\n  = n\n  + m\n",
         "the number is too large"},
        {"keep others\nc\n  split 0 2 1\n  = n\n",
         "the steps make 2 tensors, but the other side has 1 names"},
        {"keep others\nc\n  split 0\n  = n\n  + m\n", "cannot be divided into 2 equal parts"},
        {"keep others\nc\n  scatter 0 {x} 2\n  = n.{x}\n", "cannot be divided into 2 equal parts"},
        {"keep others\nc\n  unstack 2 {x}\n  = n.{x}\n", "a tensor [3, 2] has no dim 2"},
        {"keep others\nc\n  transpose 0 2\n  = n\n", "a tensor [3, 2] has no dim 2"},
        {"keep others\nc\n  permute 0 1 2\n  = n\n", "a tensor [3, 2] does not have 3 dims"},
        {"keep others\nc\n  unflatten 0 2 2\n  = n\n",
         "a dim of 3 does not have the sizes of its parts, 4 together"},
        {"keep others\nc\n  unflatten 0 _ _\n  = n\n", "the number '_' is unknown"},
        {"keep others\nc\n  flatten 0 2 3\n  = n\n", "the sizes to flatten do not fit the dims"},
        {"keep others\nc\n  flatten 1 3 2\n  = n\n", "has no dim 2"},
        {"keep others\nc\n  reshape 2 3 : 6\n  = n\n",
         "a tensor [3, 2] does not have the sizes to reshape"},
        {"keep others\nc\n  reshape 3 2 : 5\n  = n\n", "[3, 2] cannot be reshaped to [5]"},
        {"keep others\nc\n  unpad 0 5 6\n  = n\n", "[3, 2] has no rows 0 to 5 in dim 0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_failure(&plain_call, cases[i].text, stored_open(stored, 5), cases[i].words);
}

/* Lists of lists would be made again for each of their names. */
Test(map, lists_of_lists_do_not_multiply_without_end)
{
    const stored_tensor stored = tensor("a", 16, 0, 0);
    fsdp_text text = {0};
    const char *names = " b c d e f g h i j k l m n o p";
    fsdp_text_addf(&text, "a\n");
    for (int i = 0; i < 7; i++)
        fsdp_text_addf(&text, "  split 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n  concat 0\n");
    fsdp_text_addf(&text, "  split 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n  = a%s\n", names);
    expect_failure(&plain_call, text.data, stored_open(&stored, 1), "more than 2097152");
    fsdp_text_release(&text);
}

/* --- built-in maps ------------------------------------------------------------------------------------ */

/* Their sides, by which they are chosen before they are read, are those of their texts. */
Test(map, every_built_in_map_is_read)
{
    static const char *const types[] = {"llama", "mistral", "mixtral", "qwen2",
                                        "qwen3", "gpt2",    "bert"};
    const fsdp_builtin_map *builtin;
    size_t count = 0;
    for (; (builtin = fsdp_map_builtin_at(count)) != NULL; count++) {
        fsdp_map *map = NULL;
        fsdp_error err = {0};
        cr_assert_eq(fsdp_map_builtin(builtin->name, &map, &err), FSDP_OK, "%s", err.text);
        cr_expect_str_eq(map->name, builtin->name);
        for (int side = 0; side < 2; side++) {
            cr_expect_neq(builtin->layouts[side][0], '\0', "%s", builtin->name);
            cr_expect_str_eq(fsdp_map_layout(map, side), builtin->layouts[side]);
        }
        for (size_t i = 0; i < sizeof types / sizeof *types; i++)
            cr_expect_eq(fsdp_map_is_for(map, types[i]),
                         fsdp_map_types_have(builtin->types, types[i]), "%s, %s", builtin->name,
                         types[i]);
        fsdp_map_free(map);
    }
    cr_expect_geq(count, 12);
}

Test(map, a_map_is_for_whole_types)
{
    fsdp_map *map = parse("right hf for llama qwen2\na = b\n");
    cr_expect(fsdp_map_is_for(map, "llama") && fsdp_map_is_for(map, "qwen2"));
    cr_expect(!fsdp_map_is_for(map, "qwen") && !fsdp_map_is_for(map, "alpaca") &&
              !fsdp_map_is_for(map, ""));
    fsdp_map_free(map);
}

/* --- moments ------------------------------------------------------------------------------------------- */

static bool takes_moment(const char *text, const char *name)
{
    fsdp_map *map = parse(text);
    const fsdp_entry entry = {
        .kind = FSDP_ENTRY_TENSOR, .name = (char *)name, .name_size = strlen(name)};
    bool takes = fsdp_map_takes_moment(map, false, &entry, 0);
    fsdp_map_free(map);
    return takes;
}

Test(map, moments_of_parameters_that_a_map_takes_are_known)
{
    cr_expect(takes_moment("a.{x} = b.{x}\n", "optim.state.a.1.exp_avg"));
    cr_expect(takes_moment("a.{x} = b.{x}\n", "state.a.1.exp_avg"));
    cr_expect(takes_moment("a.{x} = b.{x}\n", "train_state.optim.state.a.1.exp_avg"));
    cr_expect(takes_moment("state.a = b\n", "optim.state.state.a.exp_avg"));
    cr_expect_not(takes_moment("a.{x} = b.{x}\n", "optim.state.c.1.exp_avg"));
    cr_expect_not(takes_moment("a.{x} = b.{x}\n", "optim.estate.a.1.exp_avg"));
    cr_expect_not(takes_moment("a.{x} = b.{x}\n", "optim.state.a.1"));
    cr_expect_not(takes_moment("a.{x} = b.{x}\n", "optim.state."));
    cr_expect_not(takes_moment("frame m.* = n.*\na = b\n", "m.a"), "a rule takes it itself");
}

/* --- failing memory ------------------------------------------------------------------------------------ */

static fsdp_status whole_way(fsdp_checkpoint *checkpoint, const char *text, fsdp_error *err)
{
    fsdp_map *map = NULL;
    fsdp_status st = fsdp_map_parse(text, strlen(text), "x.map", &map, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    st = fsdp_map_apply(map, false, &plain_call, &checkpoint, err);
    fsdp_checkpoint_close(checkpoint);
    fsdp_map_free(map);
    return st;
}

Test(map, every_allocation_may_fail)
{
    const stored_tensor stored[] = {tensor("o", 2, 0, 0), tensor("d.0.a", 1, 2, 0),
                                    tensor("d.1.a", 1, 2, 2)};
    const char *text = "frame m.{k:u|v}.* = n.*.{k:u|v}\nunstacked d. = d.{l}.\nsize "
                       "s = 1 | 2\nkeep others\n"
                       "d.a\n  unstack 0 {l}\n  unflatten 0 s 1\n  = e.{l}\np = q\no = r\n";
    int64_t n = 0;
    for (;; n++) {
        fsdp_error err = {0};
        fsdp_checkpoint *base = stored_open_tied(stored, 3, "p");
        (void)fsdp_mem_fail_after(n, true);
        fsdp_status st = whole_way(base, text, &err);
        (void)fsdp_mem_fail_after(-1, false);
        if (st == FSDP_OK)
            break;
        cr_assert_eq(err.status, st);
        cr_assert(err.text[0]);
        cr_assert_lt(n, 400);
    }
    cr_assert_gt(n, 10);
}

/* The names of the map get the key above the model: what was read of it is freed once. */
Test(map, every_allocation_of_a_choice_may_fail)
{
    const stored_tensor stored[] = {tensor("model.w", 2, 3, 0), tensor("model.b", 3, 0, 6)};
    char path[] = "choice-XXXXXX.map";
    FILE *file = fdopen(mkstemps(path, (int)strlen(".map")), "w");
    cr_assert(file && fputs("w = v\nb = c\n", file) > 0 && fclose(file) == 0);
    const fsdp_convert_opts opts = {.map = path};
    const fsdp_map_request request = {
        .io = fsdp_io_posix(), .opts = &opts, .target = fsdp_format_to("fsdp")};
    fsdp_status st = FSDP_ERR_LIMIT;
    int64_t n = 0;
    for (; st != FSDP_OK; n++) {
        fsdp_error err = {0};
        fsdp_map_sides sides;
        fsdp_checkpoint *checkpoint = stored_open(stored, 2);
        for (size_t i = 0; i < 2; i++) /* "model", "w" */
            cr_assert_eq(fsdp_sd_set_path(checkpoint->manifest.sd, i, (int32_t[]){5, 1}, 2, &err),
                         FSDP_OK);
        (void)fsdp_mem_fail_after(n, true);
        st = fsdp_map_rename(&request, &checkpoint, &sides, &err);
        (void)fsdp_mem_fail_after(-1, false);
        cr_assert(st == FSDP_OK || err.status == st, "%s", err.text);
        cr_assert_lt(n, 400, "%s", err.text);
        if (st == FSDP_OK)
            expect_tensor(checkpoint, "model.v", "2x3: 0 1 2 3 4 5");
        fsdp_checkpoint_close(checkpoint);
    }
    unlink(path);
    cr_assert_gt(n, 20);
}
