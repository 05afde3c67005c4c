/*
 * Sources of bench convert. Threads as ranks save a native checkpoint, and fsdp-convert writes it in the
 * format that a case reads; what it cannot write, the peer does. See bench_convert.h.
 */
#include "tests/bench/checkpoint/bench_convert.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SAVED_BY = 4, FROM = 8, OPTIONS = 7 };

/* --- native checkpoints ----------------------------------------------------------------------------- */

typedef struct native_source {
    const char *name;
    int world;
    fsdp_status (*model)(const bench_llama *shape, bench_model *model_out, fsdp_error *err);
    bool is_many; /* 40,000 tensors; else without model: plain matrices */
} native_source;

static const native_source natives[] = {
    {"native-4", SAVED_BY, NULL, false},
    {"native-8", FROM, NULL, false},
    {"native-many", SAVED_BY, NULL, true},
    {"native-llama", SAVED_BY, bench_convert_llama, false},
    {"native-fp8", SAVED_BY, bench_convert_scaled_llama, false},
    {"native-adapter", SAVED_BY, bench_convert_adapter, false},
};

static fsdp_status init_model(const native_source *kind, int64_t bytes, bench_model *model_out,
                              fsdp_error *err)
{
    bench_llama shape = bench_llama_of(bytes);
    if (kind->model)
        return kind->model(&shape, model_out, err);
    return kind->is_many ? bench_model_init(model_out, "moe", 0.0002, err)
                         : bench_model_init_plain(model_out, BENCH_TENSORS, bytes, err);
}

typedef struct native_save {
    const row_options *opts;
    const bench_model *model;
    const char *path;
    int world;
    bool has_moments;
} native_save;

static fsdp_status save_model(void *context, bench_child_result *result, fsdp_error *err)
{
    const native_save *save = context;
    bench_state_opts state = {.world = save->world,
                              .weights_only = !save->has_moments,
                              .no_groups = true,
                              .seed = save->opts->seed,
                              .step = BENCH_STEP};
    (void)result;
    return bench_save_model(save->opts, save->model, &state, save->path, err);
}

static fsdp_status save_native(const convert_job *job, const native_source *kind, const char *path,
                               int64_t bytes, fsdp_error *err)
{
    bench_model model;
    bench_child_result ignored;
    if (access(path, F_OK) == 0)
        return FSDP_OK;
    FSDP_TRY(init_model(kind, bytes, &model, err));
    native_save save = {job->opts, &model, path, kind->world, kind->is_many};
    fsdp_status st = bench_in_child(save_model, &save, &ignored, err);
    bench_model_release(&model);
    return st;
}

fsdp_status bench_convert_make_plain(convert_job *job, const char *path, int world, int64_t bytes,
                                     fsdp_error *err)
{
    const native_source kind = {.name = "native", .world = world};
    return save_native(job, &kind, path, bytes, err);
}

static fsdp_status make_native(convert_job *job, const char *name, const char *path,
                               fsdp_error *err)
{
    for (size_t i = 0; i < sizeof natives / sizeof *natives; i++)
        if (strcmp(natives[i].name, name) == 0)
            return save_native(job, &natives[i], path, job->opts->size, err);
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "there is no source '%s'", name);
}

/* --- what is next to weights ----------------------------------------------------------------------- */

static fsdp_status make_directory(const char *path, fsdp_error *err)
{
    return mkdir(path, 0777) == 0 || errno == EEXIST
               ? FSDP_OK
               : fsdp_fail_errno(err, errno, "cannot make '%s'", path);
}

/* config.json of the Llama that the options' size gives. */
static fsdp_status make_config(convert_job *job, const char *dir, fsdp_error *err)
{
    char path[BENCH_PATH];
    bench_llama shape = bench_llama_of(job->opts->size);
    FSDP_TRY(make_directory(dir, err));
    bench_path(path, dir, "config.json");
    return bench_write_llama_config(&shape, path, err);
}

static fsdp_status make_adapter_config(convert_job *job, const char *dir, fsdp_error *err)
{
    char path[BENCH_PATH];
    (void)job;
    FSDP_TRY(make_directory(dir, err));
    bench_path(path, dir, "adapter_config.json");
    return bench_write_adapter_config(path, err);
}

/* --- files of Megatron's ranks ---------------------------------------------------------------------- */

/* A torch.save file of {"model": ...} for one rank. */
static fsdp_status write_rank(convert_job *job, const char *dir, int rank, int stage,
                              fsdp_error *err)
{
    static const char *const options[] = {"--to", "torch", "--rename",
                                          "s/^model\\.rank[0-9]\\./model./", NULL};
    char name[32], path[BENCH_PATH], file[BENCH_PATH], native[BENCH_PATH];
    bench_llama shape = bench_llama_of(job->opts->size);
    bench_model model;
    bench_child_result ignored;
    snprintf(name, sizeof name, "mp_rank_%02d_%03d", rank, stage);
    bench_path(path, dir, name);
    FSDP_TRY(make_directory(path, err));
    bench_path(native, path, "native");
    bench_path(file, path, "model_optim_rng.pt");
    FSDP_TRY(bench_convert_megatron(&shape, rank, stage, &model, err));
    native_save save = {.opts = job->opts, .model = &model, .path = native, .world = 1};
    fsdp_status st = bench_in_child(save_model, &save, &ignored, err);
    bench_model_release(&model);
    const convert_call call = {.from = native, .to = file, .options = options};
    if (st == FSDP_OK)
        st = bench_convert_run(job, &call, NULL, err);
    return st == FSDP_OK ? bench_remove(native, err) : st;
}

static fsdp_status make_megatron(convert_job *job, const char *dir, fsdp_error *err)
{
    FSDP_TRY(make_directory(dir, err));
    for (int stage = 0; stage < BENCH_STAGES; stage++)
        for (int rank = 0; rank < BENCH_TENSOR_RANKS; rank++)
            FSDP_TRY(write_rank(job, dir, rank, stage, err));
    return FSDP_OK;
}

/* --- sources ---------------------------------------------------------------------------------------- */

typedef struct convert_source {
    const char *name, *native;
    const char *options[OPTIONS]; /* of fsdp-convert; the first NULL: the native one itself */
    const char *task;             /* of the peer, which writes it from the native one's size */
    const char *file;             /* below name: where the weights lie; NULL: name is it */
    fsdp_status (*beside)(convert_job *job, const char *dir, fsdp_error *err); /* comes first */
    bool drops_native; /* no other case reads it */
} convert_source;

static const convert_source sources[] = {
    {.name = "native-8", .native = "native-8"},
    {.name = "dcp-4", .native = "native-4", .options = {"--to", "dcp"}},
    {.name = "dcp-8", .native = "native-8", .options = {"--to", "dcp"}},
    {.name = "dcp-many", .native = "native-many", .options = {"--to", "dcp", "--drop", "values"}},
    {.name = "torch.pt", .native = "native-4", .options = {"--to", "torch"}},
    {.name = "columns", .native = "native-4", .task = "make-columns"},
    {.name = "zero", .native = "native-4", .task = "make-zero"},
    {.name = "config", .beside = make_config},
    {.name = "llama",
     .native = "native-llama",
     .options = {"--to", "safetensors", "--rename", "s/^model[.]//"},
     .beside = make_config,
     .file = "model.safetensors",
     .drops_native = true},
    {.name = "fp8",
     .native = "native-fp8",
     .options = {"--to", "safetensors", "--rename", "s/^model[.]//", "--dtype-for",
                 "_proj[.]weight$=f8e4m3"},
     .beside = make_config,
     .file = "model.safetensors",
     .drops_native = true},
    {.name = "adapter",
     .native = "native-adapter",
     .options = {"--to", "safetensors", "--rename", "s/^model[.]//"},
     .beside = make_adapter_config,
     .file = "adapter_model.safetensors",
     .drops_native = true},
    {.name = "megatron", .beside = make_megatron},
};

static const convert_source *find(const char *name)
{
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        if (strcmp(sources[i].name, name) == 0)
            return &sources[i];
    return NULL;
}

bool bench_convert_needs_peer(const char *source)
{
    const convert_source *kind = find(source);
    return kind && kind->task;
}

static fsdp_status write_source(convert_job *job, const convert_source *kind, const char *path,
                                fsdp_error *err)
{
    char native[BENCH_PATH], file[BENCH_PATH];
    bench_path(native, job->dir, kind->native);
    bench_path(file, path, kind->file ? kind->file : "");
    const char *to = kind->file ? file : path;
    const convert_call call = {.from = native, .to = to, .options = kind->options};
    FSDP_TRY(make_native(job, kind->native, native, err));
    if (kind->task)
        FSDP_TRY(
            bench_convert_ask_peer(job, (const char *[]){kind->task, native, path}, NULL, err));
    else if (kind->options[0])
        FSDP_TRY(bench_convert_run(job, &call, NULL, err));
    return kind->drops_native ? bench_remove(native, err) : FSDP_OK;
}

fsdp_status bench_convert_make_source(convert_job *job, const char *name, fsdp_error *err)
{
    const convert_source *kind = find(name);
    char path[BENCH_PATH];
    bench_path(path, job->dir, name);
    if (!kind)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "there is no source '%s'", name);
    if (access(path, F_OK) == 0)
        return FSDP_OK;
    if (kind->beside)
        FSDP_TRY(kind->beside(job, path, err));
    return kind->native ? write_source(job, kind, path, err) : FSDP_OK;
}
