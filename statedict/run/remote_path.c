/* Advice about names that are not paths: see remote_path.h. */
#include "statedict/run/remote_path.h"

#include "base/core/mem.h"
#include "base/text.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

static const char hub_command[] = "hf download";

/* Beginnings of addresses, and the command that copies what they name into a directory. */
static const struct {
    const char *start, *service, *command;
} services[] = {
    {"hf://", "Hugging Face", hub_command},
    {"https://huggingface.co/", "Hugging Face", hub_command},
    {"s3://", "S3", "aws s3 cp --recursive"},
    {"gs://", "Google Cloud", "gcloud storage cp --recursive"},
    {"https://", "the web", "curl -LO"},
    {"http://", "the web", "curl -LO"},
};

static bool is_word(char c)
{
    return c && (isalnum((unsigned char)c) || strchr("._-", c));
}

/* "org/name", of which nothing lies here; the name of a file of weights is a path. */
static bool is_hub_name(fsdp_io *io, const char *path)
{
    static const char *const files[] = {".safetensors", ".pt",  ".pth",  ".bin",    ".ckpt", ".h5",
                                        ".npz",         ".npy", ".gguf", ".distcp", ".json"};
    const char *slash = strchr(path, '/');
    if (!slash || slash == path || !slash[1] || strchr(slash + 1, '/') || path[0] == '.')
        return false;
    for (const char *c = path; *c; c++)
        if (c != slash && !is_word(*c))
            return false;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (fsdp_has_suffix(path, files[i]))
            return false;
    char *folder = fsdp_strndup(path, (size_t)(slash - path));
    bool is_free = folder && !fsdp_io_exists(io, folder);
    fsdp_free(folder);
    return is_free;
}

/* The last part of an address, as the name of a directory. */
static void add_directory(fsdp_text *text, const char *path)
{
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    size_t at = size;
    while (at > 0 && is_word(path[at - 1]))
        at--;
    if (at < size)
        fsdp_text_add(text, path + at, size - at);
    else
        fsdp_text_addf(text, "model");
}

/* "hf download org/name --local-dir name"; what follows the name in an address is a page of it. */
static void add_hub(fsdp_text *text, const char *name)
{
    fsdp_text model = {0};
    int slashes = 0;
    for (const char *c = name; is_word(*c) || (*c == '/' && c[1] && slashes == 0); c++) {
        slashes += *c == '/';
        fsdp_text_add(&model, c, 1);
    }
    fsdp_text_addf(text, "'%s %s --local-dir ", hub_command, model.data ? model.data : "");
    add_directory(text, model.data ? model.data : "");
    fsdp_text_addf(text, "'");
    text->failed = text->failed || model.failed;
    fsdp_text_release(&model);
}

static void add_copy(fsdp_text *text, const char *command, const char *path)
{
    bool takes_directory = strcmp(command, "curl -LO") != 0;
    fsdp_text_addf(text, "'%s ", command);
    for (const char *c = path; is_word(*c) || (*c && strchr("/:~%+=@", *c)); c++)
        fsdp_text_add(text, c, 1);
    if (takes_directory) {
        fsdp_text_addf(text, " ");
        add_directory(text, path);
    }
    fsdp_text_addf(text, "'");
}

static void advise(fsdp_io *io, const char *path, fsdp_text *text)
{
    for (size_t i = 0; i < sizeof services / sizeof *services; i++) {
        size_t size = strlen(services[i].start);
        if (strncmp(path, services[i].start, size) != 0)
            continue;
        fsdp_text_addf(text,
                       "; it is an address of %s, but only local files are read; get it with ",
                       services[i].service);
        if (strcmp(services[i].command, hub_command) == 0)
            add_hub(text, path + size);
        else
            add_copy(text, services[i].command, path);
        return;
    }
    if (strstr(path, "://"))
        fsdp_text_addf(text, "; it is an address, but only local files are read; copy it first");
    else if (is_hub_name(io, path)) {
        fsdp_text_addf(text, "; if that is a model of Hugging Face, get it with ");
        add_hub(text, path);
        fsdp_text_addf(text, " and name its directory");
    }
}

static void append_advice(fsdp_io *io, const char *path, fsdp_error *err)
{
    fsdp_text text = {0};
    advise(io, path, &text);
    if (text.size > 0 && !text.failed) {
        fsdp_error found = *err;
        fsdp_fail(err, found.status, "%s%s", found.text, text.data);
        err->errnum = found.errnum;
    }
    fsdp_text_release(&text);
}

fsdp_status fsdp_remote_path_fail(fsdp_io *io, const char *path, int errnum, fsdp_error *err)
{
    fsdp_status st = fsdp_fail_errno(err, errnum, "cannot open '%s'", path);
    if (err && (errnum == ENOENT || errnum == ENOTDIR))
        append_advice(io, path, err);
    return st;
}
