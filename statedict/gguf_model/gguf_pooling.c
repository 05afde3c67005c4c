/*
 * How the embedding of a text is made of those of its tokens, as a pair of GGUF: modules.json of
 * sentence-transformers lists what follows the encoder, and the folder of Pooling has its settings. See
 * gguf_values.h.
 */
#include "statedict/gguf_model/gguf_values.h"

#include "base/data/json.h"
#include "base/text.h"
#include "formats/frameworks.h"

#include <stdio.h>
#include <string.h>

enum { LARGEST_FILE = 1 << 20 };

const fsdp_gguf_pooling fsdp_gguf_poolings[FSDP_GGUF_POOLINGS] = {
    {"mean", "pooling_mode_mean_tokens", 1},
    {"cls", "pooling_mode_cls_token", 2},
    {"lasttoken", "pooling_mode_lasttoken", 3},
};

/* --- modules.json ------------------------------------------------------------------------------- */

/* What modules.json lists: folder is "" where it has no Pooling. */
typedef struct module_list {
    const char *path; /* of modules.json */
    char folder[256];
} module_list;

/* [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}, ...] */
typedef struct model_module {
    char type[128], path[256];
} model_module;

static fsdp_status copy_string(fsdp_json *json, char *out, size_t room, fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (size >= room || memchr(text, '\0', size))
        return fsdp_json_fail(json, err, "the type or the path of a module is too long");
    memcpy(out, text, size);
    out[size] = '\0';
    return FSDP_OK;
}

static fsdp_status read_module(fsdp_json *json, model_module *out, fsdp_error *err)
{
    static const char *const names[] = {"type", "path"};
    fsdp_json_members members = {.names = names, .count = 2};
    *out = (model_module){.type = ""};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(which == 0 ? copy_string(json, out->type, sizeof out->type, err)
                            : copy_string(json, out->path, sizeof out->path, err));
    }
}

/* llama.cpp pools, and its users normalize; it has nothing else after the encoder. */
static fsdp_status take_module(module_list *list, const model_module *module, fsdp_error *err)
{
    const char *dot = strrchr(module->type, '.'), *kind = dot ? dot + 1 : module->type;
    if (strcmp(kind, "Transformer") == 0 || strcmp(kind, "Normalize") == 0)
        return FSDP_OK;
    if (strcmp(kind, "Pooling") != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' lists the module '%s', which llama.cpp does not compute; "
                         "write the encoder alone with --copy-from DIR without modules.json",
                         list->path, kind);
    if (list->folder[0] || !module->path[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' lists %s", list->path,
                         list->folder[0] ? "two modules 'Pooling', but llama.cpp computes one"
                                         : "a module 'Pooling' without a folder");
    snprintf(list->folder, sizeof list->folder, "%s", module->path);
    return FSDP_OK;
}

static fsdp_status read_modules(fsdp_json *json, module_list *list, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        model_module module;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        FSDP_TRY(read_module(json, &module, err));
        FSDP_TRY(take_module(list, &module, err));
    }
}

static fsdp_status take_list(module_list *list, const char *text, size_t size, fsdp_error *err)
{
    fsdp_json json;
    fsdp_io_names folders;
    fsdp_status st = fsdp_framework_modules(text, size, list->path, &folders, err);
    fsdp_io_names_release(&folders); /* none leads out of the directory */
    fsdp_json_init(&json, text, size, list->path);
    if (st == FSDP_OK)
        st = read_modules(&json, list, err);
    fsdp_json_release(&json);
    return st;
}

/* --- the settings ------------------------------------------------------------------------------- */

/* The number of the one mode that is set, in either form of the settings; 0: none, or one more that llama.cpp
 * lacks. */
static int find_pooling(const fsdp_value *json)
{
    static const char *const others[] = {"pooling_mode_max_tokens",
                                         "pooling_mode_mean_sqrt_len_tokens",
                                         "pooling_mode_weightedmean_tokens"};
    const char *named = fsdp_config_word(json, "pooling_mode");
    int number = 0, count = 0;
    double is_set;
    for (size_t i = 0; i < FSDP_GGUF_POOLINGS; i++) {
        const fsdp_gguf_pooling *pooling = &fsdp_gguf_poolings[i];
        bool is_named = named && strcmp(named, pooling->mode) == 0;
        if (is_named || (!named && fsdp_config_real(json, pooling->flag, &is_set) && is_set != 0)) {
            number = pooling->number;
            count++;
        }
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        count += !named && fsdp_config_real(json, others[i], &is_set) && is_set != 0;
    return count == 1 ? number : 0;
}

static fsdp_status take_settings(const fsdp_config_file *file, int *number_out, fsdp_error *err)
{
    double with_prompt;
    *number_out = find_pooling(&file->json);
    if (*number_out == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' does not set one of the modes of pooling that llama.cpp computes, "
                         "which are mean, cls and lasttoken",
                         file->path);
    if (fsdp_config_real(&file->json, "include_prompt", &with_prompt) && with_prompt == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says include_prompt false, but llama.cpp pools all tokens",
                         file->path);
    return FSDP_OK;
}

static fsdp_status read_text(fsdp_io *io, const char *path, char **text_out, size_t *size_out,
                             fsdp_error *err)
{
    return fsdp_source_read_file(io, path, LARGEST_FILE, text_out, size_out, err);
}

static fsdp_status read_settings(fsdp_io *io, const char *directory, const char *folder,
                                 int *number_out, fsdp_error *err)
{
    fsdp_text path = {0};
    fsdp_config_file file = {0};
    char *text = NULL;
    size_t size = 0;
    fsdp_text_addf(&path, "%s/%s/config.json", directory, folder);
    fsdp_status st = path.failed ? fsdp_fail_memory(err, directory)
                                 : read_text(io, path.data, &text, &size, err);
    if (st == FSDP_OK)
        st = fsdp_config_parse(text, size, path.data, &file, err);
    if (st == FSDP_OK)
        st = take_settings(&file, number_out, err);
    fsdp_config_release(&file);
    fsdp_free(text);
    fsdp_text_release(&path);
    return st;
}

static fsdp_status find_pooling_of(fsdp_io *io, const char *directory, int *number_out,
                                   fsdp_error *err)
{
    char *path = fsdp_path_join(directory, fsdp_framework_module_list), *text = NULL;
    module_list list = {.path = path};
    size_t size = 0;
    fsdp_status st = path ? FSDP_OK : fsdp_fail_memory(err, directory);
    *number_out = 0;
    if (st == FSDP_OK && fsdp_io_exists(io, path)) {
        st = read_text(io, path, &text, &size, err);
        if (st == FSDP_OK)
            st = take_list(&list, text, size, err);
        if (st == FSDP_OK && list.folder[0])
            st = read_settings(io, directory, list.folder, number_out, err);
    }
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_gguf_add_pooling(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                                  fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &model->config->architecture->gguf;
    char name[FSDP_GGUF_KEY];
    int number;
    if (!gguf->is_encoder)
        return FSDP_OK;
    FSDP_TRY(find_pooling_of(io, model->directory, &number, err));
    fsdp_gguf_spell_key(name, gguf->architecture, FSDP_GGUF_POOLING_KEY);
    fsdp_value value = fsdp_value_i64(number);
    return number > 0 ? fsdp_named_values_add(out, name, &value, err) : FSDP_OK;
}
