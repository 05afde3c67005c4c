/* For tests of GGUF's key-value pairs: the pairs of a config.json and of a directory with a tokenizer. */
#ifndef FSDP_MODEL_PAIRS_H
#define FSDP_MODEL_PAIRS_H

#include "statedict/gguf_model/gguf_values.h"
#include "statedict/models/config.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *config = "{}";
static char directory[64];
static fsdp_named_values values;
static fsdp_error err;
static fsdp_gguf_found found;
static fsdp_sd *tensors; /* NULL: not known */

static inline void begin(void)
{
    strcpy(directory, "/tmp/fsdp-gguf-XXXXXX");
    cr_assert(mkdtemp(directory));
}

static inline void end(void)
{
    fsdp_named_values_release(&values);
    fsdp_sd_free(tensors);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
}

static inline fsdp_status read_all(void)
{
    fsdp_config_file file;
    const fsdp_gguf_model model = {.config = &file, .directory = directory, .sd = tensors};
    fsdp_status st = fsdp_config_parse(config, strlen(config), NULL, &file, &err);
    if (st == FSDP_OK)
        st = fsdp_gguf_values(fsdp_io_posix(), &model, &values, &found, &err);
    fsdp_config_release(&file);
    return st;
}

static inline const fsdp_value *find(const char *name)
{
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, name) == 0)
            return &values.items[i].value;
    return NULL;
}

static inline int64_t number(const char *name)
{
    const fsdp_value *value = find(name);
    return value && value->kind == FSDP_VALUE_I64 ? value->as.i64 : -1;
}

/* 0 or 1; -1: there is none. */
static inline int flag(const char *name)
{
    const fsdp_value *value = find(name);
    return value && value->kind == FSDP_VALUE_BOOL ? value->as.boolean : -1;
}

static inline const char *text_of(const fsdp_value *value)
{
    return value && value->kind == FSDP_VALUE_STRING ? value->as.bytes.data : "";
}

static inline const fsdp_value *item(const char *name, size_t i)
{
    const fsdp_value *value = find(name);
    cr_assert(value && value->kind == FSDP_VALUE_LIST && i < value->as.list.count, "%s %zu", name,
              i);
    return &value->as.list.items[i];
}

/* The config of a llama with further members. */
static inline fsdp_status read_with(const char *type, const char *members)
{
    static char text[900];
    snprintf(text, sizeof text,
             "{\"model_type\": \"%s\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
             "\"num_attention_heads\": 4, \"max_position_embeddings\": 128, %s}",
             type, members);
    config = text;
    fsdp_named_values_release(&values);
    return read_all();
}

/* Members of a family that llama.cpp computes otherwise, or not at all. */
static inline void expect_refused(const char *type, const char *const refused[][2], size_t count)
{
    for (size_t i = 0; i < count; i++) {
        cr_assert_eq(read_with(type, refused[i][0]), FSDP_ERR_USAGE, "%s", refused[i][0]);
        cr_expect(strstr(err.text, refused[i][1]), "%s: %s", refused[i][0], err.text);
    }
}

#define EXPECT_REFUSED(type, refused) \
    expect_refused(type, refused, sizeof(refused) / sizeof *(refused))

static inline void add_value(fsdp_sd *sd, const char *name, const fsdp_value *value)
{
    cr_assert_eq(fsdp_sd_add_value(sd, name, strlen(name), value, &err), FSDP_OK, "%s", err.text);
}

#endif
