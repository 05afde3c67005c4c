/* Files that a command writes: what they may replace. See train.h. */
#include "tools/train/train.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* An empty file, as mktemp makes them, holds nothing that could be lost. */
static bool is_array(const char *begin, size_t size)
{
    return size == 0 || (size >= 6 && memcmp(begin, "\x93NUMPY", 6) == 0);
}

/* The size of the header in 8 bytes, then a JSON object: no header has 4 GiB. */
static bool is_safetensors(const char *begin, size_t size)
{
    static const char high[4];
    return size == 0 || (size > 8 && memcmp(begin + 4, high, sizeof high) == 0 && begin[8] == '{');
}

static bool is_same_file(const struct stat *a, const char *path)
{
    struct stat b;
    return path && *path && stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

/* Whether output lies in the file or directory `input`, which may be NULL or "". */
static bool is_part_of(const char *output, const char *input)
{
    struct stat info;
    char place[PATH_MAX];
    if (stat(output, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    if (is_same_file(&info, input))
        return true;
    char *slash = realpath(output, place) ? strrchr(place, '/') : NULL;
    if (!slash)
        return false;
    slash[slash == place] = '\0'; /* "/" stays */
    return stat(place, &info) == 0 && is_same_file(&info, input);
}

static fsdp_status check(const train_options *opts, const char *output, const cli_output_kind *kind,
                         fsdp_error *err)
{
    const char *const inputs[] = {opts->config_path,
                                  opts->tokens,
                                  opts->batches,
                                  opts->data,
                                  opts->eval,
                                  opts->sample,
                                  opts->init,
                                  opts->resume_path,
                                  opts->config.data.path,
                                  opts->config.data.val,
                                  opts->config.data.tokenizer};
    if (!output)
        return FSDP_OK;
    FSDP_TRY(cli_check_output(output, kind, NULL, err));
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (is_part_of(output, inputs[i]))
            return fsdp_fail(err, FSDP_ERR_EXISTS,
                             "'%s' is read by this command ('%s'), and is not replaced", output,
                             inputs[i]);
    return FSDP_OK;
}

fsdp_status train_outputs_check(const train_options *opts, fsdp_error *err)
{
    static const cli_output_kind array = {"array of NumPy (.npy)", is_array};
    static const cli_output_kind tensors = {"safetensors file", is_safetensors};
    FSDP_TRY(check(opts, opts->logits_out, &array, err));
    FSDP_TRY(check(opts, opts->out, &array, err));
    return check(opts, opts->dump_grads, &tensors, err);
}
