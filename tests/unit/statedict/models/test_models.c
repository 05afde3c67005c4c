/* Descriptions of models: every built-in one is whole, and a fault in one is named by its line. */
#include "statedict/models/config.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_arena arena;
static fsdp_error err;

static void end(void)
{
    fsdp_arena_release(&arena);
}

TestSuite(models, .fini = end);

static const fsdp_architecture *at(size_t i)
{
    const fsdp_architecture *model = NULL;
    cr_assert_eq(fsdp_architecture_at(&arena, i, &model, &err), FSDP_OK, "%s", err.text);
    return model;
}

static const fsdp_architecture *parse(const char *text)
{
    const fsdp_architecture *model = NULL;
    cr_assert_eq(fsdp_architecture_parse(&arena, "toy", text, &model, &err), FSDP_OK, "%s",
                 err.text);
    return model;
}

/* The last one that was read, which configs borrow. */
static fsdp_config_file file;

static fsdp_status read_file(const char *text, fsdp_error *why)
{
    fsdp_config_release(&file);
    return fsdp_config_parse(text, strlen(text), "c", &file, why);
}

static fsdp_status read_model(const char *text, fsdp_config *config)
{
    FSDP_TRY(read_file(text, &err));
    return fsdp_config_read(&file, config, &err);
}

/* --- the built-in ones --- */

/* A config.json without members, so that every formula is computed from defaults. */
static void compute_all(const fsdp_architecture *model)
{
    char text[128];
    fsdp_config config;
    int64_t value;
    snprintf(text, sizeof text, "{\"model_type\": \"%s\"}", model->model_type);
    cr_assert_eq(read_model(text, &config), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < model->row_count; i++) {
        const fsdp_tensor_row *row = &model->rows[i];
        const char *shape = strcmp(row->shape, "?") == 0 ? NULL : row->shape;
        while (shape)
            cr_assert_eq(fsdp_formula_next_dim(&config, &shape, 0, &value, &err), FSDP_OK,
                         "%s %s: %s", model->model_type, row->name, err.text);
        for (int c = 0; c < 2; c++) {
            const char *condition = c == 0 ? row->when : row->may_lack;
            if (condition)
                cr_assert_eq(fsdp_formula_compute(&config, condition, 0, &value, &err), FSDP_OK,
                             "%s %s: %s", model->model_type, row->name, err.text);
        }
    }
    for (size_t i = 0; i < model->gguf.fixed_count; i++) {
        const char *number = model->gguf.fixed[i].number, *name = model->gguf.fixed[i].member;
        bool is_list =
            fsdp_architecture_member(model, name, strlen(name))->kind == FSDP_MEMBER_REALS;
        char *rest = NULL;
        if (fsdp_architecture_member(model, name, strlen(name))->kind == FSDP_MEMBER_WORD)
            continue;
        (void)strtod(number, &rest);
        if (*rest && !is_list)
            cr_assert_eq(fsdp_formula_compute(&config, number, 0, &value, &err), FSDP_OK,
                         "%s %s: %s", model->model_type, number, err.text);
    }
    fsdp_arena_release(&config.arena);
}

Test(models, have_formulas_of_known_members)
{
    size_t families = 0;
    for (size_t i = 0; at(i); i++)
        if (at(i)->row_count > 0) {
            compute_all(at(i));
            families++;
        }
    cr_expect_geq(families, 30u);
}

Test(models, have_bases_of_their_own_first)
{
    for (size_t i = 0; at(i); i++) {
        const fsdp_architecture *model = at(i);
        cr_expect_gt(model->base_count, 0u, "%s", model->model_type);
        bool has_none = strcmp(model->model_type, "t5") == 0;
        cr_expect_eq(model->bases[0][0] == 0, has_none, "%s", model->model_type);
    }
}

Test(models, are_found_by_each_of_their_types)
{
    const fsdp_architecture *model = NULL;
    cr_assert_eq(fsdp_architecture_find(&arena, "bloom", 5, &model, &err), FSDP_OK);
    cr_assert_not_null(model);
    cr_expect_str_eq(model->model_type, "bloom");
    cr_expect_str_eq(model->bases[0], "transformer.");
    cr_expect_eq(model->row_count, 0u, "only its bases are known");
    cr_assert_eq(fsdp_architecture_find(&arena, "blooms", 6, &model, &err), FSDP_OK);
    cr_expect_null(model);
    cr_assert_eq(fsdp_architecture_find(&arena, "heads", 5, &model, &err), FSDP_OK);
    cr_expect_null(model, "a part of descriptions is no family");
}

/* --- what a description may say --- */

Test(models, take_over_what_another_one_has)
{
    const fsdp_architecture *model = parse("class ToyForCausalLM\n"
                                           "like llama\n"
                                           "member vocab_size = 7\n"
                                           "in {base}layers.{layer}.\n"
                                           "without mlp.* self_attn.o_proj.bias\n"
                                           "tensor self_attn.q_proj.weight [1, 2,\n"
                                           "    3] as q_proj when 1 == 1 # a comment\n"
                                           "    may-lack 0 spelling 2\n");
    const fsdp_config_member *member = fsdp_architecture_member(model, "vocab_size", 10);
    const fsdp_tensor_row *row = fsdp_architecture_role(model, "q_proj", 0);
    cr_assert(member && row);
    cr_expect_str_eq(member->otherwise, "7");
    cr_expect_str_eq(row->name, "{base}layers.{layer}.self_attn.q_proj.weight");
    cr_expect_str_eq(row->shape, "1, 2, 3");
    cr_expect_str_eq(row->when, "1 == 1");
    cr_expect_str_eq(row->may_lack, "0");
    cr_expect_eq(row->spelling, 2);
    cr_expect_eq(model->spellings, 2);
    cr_expect_null(fsdp_architecture_role(model, "q_proj", (size_t)(row - model->rows) + 1));
    cr_expect_null(fsdp_architecture_role(model, "gate", 0));
    cr_expect_null(fsdp_architecture_role(model, "o_proj.bias", 0));
    cr_expect_not_null(fsdp_architecture_role(model, "o_proj", 0));
    cr_expect_null(model->gguf.architecture, "only its own text says that llama.cpp has it");
    cr_expect_str_eq(model->gguf.pre, "llama-bpe");
    cr_expect_str_eq(model->class_name, "ToyForCausalLM");
    cr_expect_null(model->form, "only its own text says what the trainer computes");
}

Test(models, order_keys_as_files_have_them)
{
    const fsdp_architecture *model = parse("member a\nreal b = 2\nkey k.a = a\nkey k.b = b\n"
                                           "key k.a = b\nfixed a = 1\nfixed b = 0.5\n");
    const fsdp_gguf_names *gguf = &model->gguf;
    cr_assert(gguf->key_count == 2 && gguf->fixed_count == 2);
    cr_expect_str_eq(gguf->keys[0].key, "k.b");
    cr_expect_str_eq(gguf->keys[1].key, "k.a", "a key that comes again is the last one");
    cr_expect_str_eq(gguf->keys[1].member, "b");
    cr_expect_str_eq(gguf->fixed[1].member, "b");
    cr_expect_str_eq(gguf->fixed[1].number, "0.5");
}

Test(models, compute_keys_and_members_of_the_way_back)
{
    const fsdp_architecture *model = parse("member a\nflag b = 1\nmember $c = 2 * a - b\n"
                                           "real part = 0.5\nrotary part\nkey k.c = $c\n"
                                           "back a = ($c + b) / 2\n");
    const fsdp_gguf_names *gguf = &model->gguf;
    fsdp_config_value values[] = {{.name = "a", .is_there = true, .number = 7}};
    const fsdp_config known = {.architecture = model, .path = "c", .values = values, .count = 1};
    int64_t number = 0;
    cr_assert(gguf->key_count == 1 && gguf->back_count == 1 && gguf->rotary);
    cr_expect_eq(fsdp_architecture_member(model, "b", 1)->kind, FSDP_MEMBER_FLAG);
    cr_expect_str_eq(gguf->rotary, "part");
    cr_expect_str_eq(gguf->back[0].member, "a");
    cr_expect_str_eq(gguf->back[0].formula, "($c + b) / 2");
    cr_assert_eq(fsdp_formula_compute(&known, "$c", 0, &number, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(number, 13);
    cr_assert_eq(fsdp_formula_compute(&known, "10 - a - 2 - 1", 0, &number, &err), FSDP_OK);
    cr_expect_eq(number, 0, "from left to right");
}

Test(models, say_how_llama_cpp_computes)
{
    const fsdp_architecture *model =
        parse("member a\nmember b\nkey k.a = a needed\nkey k.b = b\nkey k.c = b\nno-key k.c\n"
              "fixed a = 2 * b + 1\ngguf toy tied longrope ropes-differ\nwindow every 4 listed\n");
    const fsdp_gguf_names *gguf = &model->gguf;
    cr_assert_eq(gguf->key_count, 2u);
    cr_expect(gguf->keys[0].is_needed && !gguf->keys[1].is_needed);
    cr_expect_str_eq(gguf->fixed[0].number, "2 * b + 1");
    cr_expect(gguf->has_no_output && gguf->ropes_differ && gguf->has_long_factors);
    cr_expect(!gguf->one_way && !gguf->has_factors && !gguf->needs_output);
    cr_expect_eq(gguf->window, FSDP_WINDOW_EVERY);
    cr_expect(gguf->window_period == 4 && gguf->lists_windows);
}

Test(models, may_have_a_name_twice)
{
    const fsdp_architecture *model = parse("tensor a [1] when 1\ntensor a [2] when 0\n");
    cr_expect_eq(model->row_count, 2u);
}

Test(models, name_the_line_of_a_fault)
{
    static const char *const faults[][2] = {
        {"\n\nmembers a = 1\n", "toy.model:3: unknown word 'members'"},
        {"member a 1\n", "toy.model:1: a member is"},
        {"member\n", "toy.model:1: a member is"},
        {"member a = 1 null\n", "toy.model:1: a member is"},
        {"# a\ntensor a\n    [1\n", "toy.model:2: no [SHAPE] follows"},
        {"tensor a [1] whenever 1\n", "toy.model:1: unknown word 'whenever'"},
        {"tensor a [1] when\n", "toy.model:1: nothing follows 'when'"},
        {"like\n", "toy.model:1: there is no description ''"},
        {"like nothing\n", "toy.model:1: there is no description 'nothing'"},
        {"like llama\nwithout a\n", "toy.model:2: no inherited tensor has the name 'a'"},
        {"like llama\n\nkey a = b\n",
         "toy.model:3: no line 'member', 'flag', 'real', 'reals' or 'word' has the name 'b'"},
        {"key a\n", "toy.model:1: a key of GGUF is"},
        {"fixed a\n", "toy.model:1: a fixed number is"},
        {"member a\nback a\n", "toy.model:2: a member of the way back is"},
        {"back a = 1\n", "toy.model:1: no line 'member', 'flag', 'real', 'reals' or 'word' has"},
        {"rotary a\n", "toy.model:1: no line 'member', 'flag', 'real', 'reals' or 'word' has"},
        {"fixed a = 1\n",
         "toy.model:1: no line 'member', 'flag', 'real', 'reals' or 'word' has the name 'a'"},
        {"window open\n", "toy.model:1: a window is never, always, if-used or every N, not 'open'"},
        {"window every\n", "toy.model:1: the number of layers is missing after 'every'"},
        {"window every 0\n", "toy.model:1: the number of layers is missing after 'every'"},
        {"window every 2 named\n",
         "toy.model:1: after the number only listed may follow, not 'named'"},
        {"member a\nkey k = a often\n",
         "toy.model:2: after the member only needed may follow, not 'often'"},
        {"member a\nkey k = a\nno-key k b\n", "toy.model:3: no inherited key has the name 'b'"},
        {"gguf llama two-way\n",
         "toy.model:1: after the name of the architecture is the unknown word 'two-way'"},
        {"bases a b c d e\n", "toy.model:1: there are too many bases"},
        {"pre a b\n", "toy.model:1: the line has a word too many: 'b'"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const fsdp_architecture *model;
        cr_expect_eq(fsdp_architecture_parse(&arena, "toy", faults[i][0], &model, &err),
                     FSDP_ERR_USAGE, "%s", faults[i][0]);
        cr_expect(strstr(err.text, faults[i][1]), "%s", err.text);
    }
}

/* --- config.json --- */

static double queries(const char *members)
{
    char text[128];
    fsdp_config config;
    double number = -1;
    snprintf(text, sizeof text, "{\"model_type\": \"deepseek_v3\"%s}", members);
    cr_assert_eq(read_model(text, &config), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_config_number(&config, "q_lora_rank", &number, &err), FSDP_OK);
    fsdp_arena_release(&config.arena);
    return number;
}

Test(models, tell_null_from_a_member_that_is_absent)
{
    cr_expect_eq(queries(""), 1536);
    cr_expect_eq(queries(", \"q_lora_rank\": null"), 0);
    cr_expect_eq(queries(", \"q_lora_rank\": 5"), 5);
}

Test(models, read_config_json_once)
{
    double number = 0;
    cr_assert_eq(read_file("{\"a\": 1, \"b\": {\"c\": [1.5, true, null, \"x\"]}, \"d\": false, "
                           "\"e\": 1e400, \"k\": [-Infinity, Infinity, NaN], \"f\": "
                           "\"g\\u0000\", \"h\": null, \"i\": \"j\"}",
                           &err),
                 FSDP_OK, "%s", err.text);
    const fsdp_value *config = &file.json;
    const fsdp_value *list = fsdp_config_at(fsdp_config_at(config, "b"), "c");
    cr_assert(list && list->kind == FSDP_VALUE_LIST && list->as.list.count == 4);
    cr_expect_eq(list->as.list.items[0].as.f64, 1.5);
    cr_expect(fsdp_config_real(config, "a", &number) && number == 1);
    cr_expect(fsdp_config_real(config, "d", &number) && number == 0);
    cr_expect(fsdp_config_real(config, "e", &number) && number > 1e300);
    cr_expect(!fsdp_config_real(config, "h", &number) && !fsdp_config_real(config, "b", &number));
    list = fsdp_config_at(config, "k");
    cr_assert(list && list->as.list.count == 3, "as Python writes them");
    cr_expect(list->as.list.items[0].as.f64 < -1e308 && list->as.list.items[1].as.f64 > 1e308 &&
              list->as.list.items[2].as.f64 != list->as.list.items[2].as.f64);
    cr_expect_null(fsdp_config_at(config, "h"));
    cr_expect_null(fsdp_config_at(config, "c"));
    cr_expect_null(fsdp_config_at(list, "a"));
    cr_expect_null(fsdp_config_word(config, "f"), "a text with a zero byte is no word");
    cr_expect_str_eq(fsdp_config_word(config, "i"), "j");
}

Test(models, refuse_a_config_json_that_is_none)
{
    static const char *const texts[] = {"[]",
                                        "{",
                                        "{\"a\": }",
                                        "{\"a\": 1} 2",
                                        "{\"text_config\": {\"a\": 1, \"a\": 1}}",
                                        "{\"a\": 1, \"b\": 2, \"a\": 1}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        cr_expect_eq(read_file(texts[i], &err), FSDP_ERR_DAMAGED, "%s", texts[i]);
    cr_expect(strstr(err.text, "'c' line 1 column 23: the key 'a' appears twice"), "%s", err.text);
    cr_expect_eq(fsdp_config_check(&file, NULL), FSDP_ERR_DAMAGED, "the file keeps the error");
    cr_expect(!file.kind.type[0] && !fsdp_config_at(&file.json, "a"));
    cr_expect_eq(read_file("{\"text_config\": {\"a\": 1, \"a\": 2}}", &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "'c' line 1 column 31: the key 'a' appears twice"), "%s", err.text);
    cr_expect_eq(read_file("{\"id2label\": {\"a\": 1, \"a\": 1}}", &err), FSDP_OK);
}

Test(models, ask_the_top_before_the_text_model)
{
    cr_assert_eq(read_file("{\"text_config\":{\"tie_word_embeddings\":false},"
                           "\"tie_word_embeddings\":true}",
                           &err),
                 FSDP_OK);
    cr_expect_eq(fsdp_config_says_tied(&file), 1);
    cr_assert_eq(read_file("{\"text_config\":{\"tie_word_embeddings\":false}}", &err), FSDP_OK);
    cr_expect_eq(fsdp_config_says_tied(&file), 0);
    cr_assert_eq(read_file("{\"tie_word_embeddings\":null}", &err), FSDP_OK);
    cr_expect_eq(fsdp_config_says_tied(&file), -1);
}

Test(models, compute_members_of_every_kind)
{
    static const char text[] =
        "{\"model_type\": \"llama\", \"hidden_size\": 64.0, \"rope_theta\": 5e5}";
    fsdp_config config;
    double number = 0;
    cr_assert_eq(read_model(text, &config), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_config_number(&config, "head_dim", &number, &err) == FSDP_OK && number == 2);
    cr_expect(fsdp_config_number(&config, "rope_theta", &number, &err) == FSDP_OK && number == 5e5);
    cr_expect(fsdp_config_number(&config, "rms_norm_eps", &number, &err) == FSDP_OK &&
              number == 1e-6);
    cr_expect_eq(fsdp_config_number(&config, "hidden_act", &number, &err), FSDP_ERR_USAGE);
    fsdp_arena_release(&config.arena);
}
