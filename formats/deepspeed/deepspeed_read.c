/*
 * The directory of a tag as a source, universal checkpoints included: bid, open, the names of its files, and
 * the order in which they are read. See deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"
#include "base/data/box_internal.h"
#include "base/text.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* === names of files =========================================================================== */

enum { NUMBERS = 3, MOST_DIGITS = 9 };

/* Names of files: '#' is a number. part, rank, layer: which number they are; -1: none. */
typedef struct file_pattern {
    const char *text;
    ds_file_kind kind;
    int part, rank, layer;
} file_pattern;

static const file_pattern patterns[] = {
    {"mp_rank_#_model_states.pt", DS_FILE_MODEL, 0, -1, -1},
    {"zero_pp_rank_#_mp_rank_#_model_states.pt", DS_FILE_MODEL, 1, 0, -1},
    {"zero_pp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_OPTIM, 1, 0, -1},
    {"bf16_zero_pp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_OPTIM, 1, 0, -1},
    {"layer_#-model_states.pt", DS_FILE_LAYER, -1, -1, 0},
    {"layer_#-model_#-model_states.pt", DS_FILE_LAYER, 1, -1, 0},
    {"layer_#_expert_#_mp_rank_#_model_states.pt", DS_FILE_EXPERT, 2, 1, 0},
    {"expp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_EXPERT_OPTIM, 1, 0, -1},
};
enum { PATTERNS = sizeof patterns / sizeof *patterns };

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool matches(const char *name, const char *pattern, int numbers_out[NUMBERS])
{
    int found = 0;
    for (; *pattern != '\0'; pattern++) {
        if (*pattern != '#') {
            if (*name++ != *pattern)
                return false;
            continue;
        }
        int digits = 0, number = 0;
        for (; is_digit(*name) && digits < MOST_DIGITS; digits++)
            number = number * 10 + (*name++ - '0');
        if (digits == 0)
            return false;
        numbers_out[found++] = number;
    }
    return *name == '\0';
}

static bool recognise(const char *name, ds_file *file_out)
{
    int numbers[NUMBERS];
    for (int i = 0; i < PATTERNS; i++) {
        const file_pattern *pattern = &patterns[i];
        if (!matches(name, pattern->text, numbers))
            continue;
        *file_out = (ds_file){.name = name,
                              .kind = pattern->kind,
                              .part = pattern->part < 0 ? 0 : numbers[pattern->part],
                              .rank = pattern->rank < 0 ? -1 : numbers[pattern->rank],
                              .layer = pattern->layer < 0 ? 0 : numbers[pattern->layer]};
        return true;
    }
    return false;
}

static int compare_files(const void *a, const void *b)
{
    const ds_file *x = a, *y = b;
    const int64_t orders[] = {(int64_t)x->kind - (int64_t)y->kind, (int64_t)x->part - y->part,
                              (int64_t)x->layer - y->layer, (int64_t)x->rank - y->rank};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++)
        if (orders[i] != 0)
            return orders[i] < 0 ? -1 : 1;
    return 0;
}

/* A run with bf16 and one without it may have left their files in the same tag. */
static fsdp_status check_twins(const ds_files *files, fsdp_error *err)
{
    for (size_t i = 1; i < files->count; i++)
        if (compare_files(&files->items[i - 1], &files->items[i]) == 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' and '%s' both belong to one rank",
                             files->items[i - 1].name, files->items[i].name);
    return FSDP_OK;
}

/* Recognises the names of a directory; the caller frees the items, also on failure. FSDP_ERR_DAMAGED: two
 * files are of the same rank. */
static fsdp_status find_files(const char *const *names, size_t count, ds_files *files_out,
                              fsdp_error *err)
{
    *files_out = (ds_files){0};
    for (size_t i = 0; i < count; i++) {
        ds_file file;
        if (!recognise(names[i], &file))
            continue;
        if (!fsdp_grow(&files_out->items, &files_out->room, files_out->count + 1,
                       sizeof *files_out->items))
            return fsdp_fail_memory(err, "the files of a checkpoint");
        files_out->items[files_out->count++] = file;
    }
    if (files_out->count > 0)
        qsort(files_out->items, files_out->count, sizeof *files_out->items, compare_files);
    return check_twins(files_out, err);
}

/* The files of a kind and part (-1: any), which are neighbours; NULL: none. */
static const ds_file *files_of(const ds_files *files, ds_file_kind kind, int part,
                               size_t *count_out)
{
    const ds_file *first = NULL;
    *count_out = 0;
    for (size_t i = 0; i < files->count; i++) {
        const ds_file *file = &files->items[i];
        if (file->kind != kind || (part >= 0 && file->part != part))
            continue;
        first = first ? first : file;
        (*count_out)++;
    }
    return first;
}

/* FSDP_ERR_DAMAGED when the ranks of the files are not 0, 1, 2, ... */
static fsdp_status check_ranks(const ds_file *files, size_t count, const char *directory,
                               fsdp_error *err)
{
    for (size_t i = 0; i < count; i++)
        if (files[i].rank != (int)i)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': the file of rank %zu, before '%s', is missing", directory, i,
                             files[i].name);
    return FSDP_OK;
}

/* === files ==================================================================================== */

static fsdp_status read_archive(ds_set *set, int file, ds_reader *read, fsdp_error *err)
{
    torch_archive archive;
    const char *path = fsdp_source_file_path(set->source, (size_t)file);
    fsdp_text where = {0};
    fsdp_text_addf(&where, "'%s'", path);
    if (where.failed)
        return fsdp_fail_memory(err, path);
    const torch_opening opening = {.source = set->source,
                                   .memory = set->memory,
                                   .file = file,
                                   .stream = FSDP_NO_STREAM,
                                   .where = where.data};
    fsdp_status st = torch_file_open(&opening, &archive, err);
    if (st == FSDP_OK)
        st = read(set, &archive, err);
    torch_archive_release(&archive);
    fsdp_text_release(&where);
    return st;
}

/* Opens a torch.save file of the directory ("zero/NAME/fp32.pt"), reads it and frees its pickle. */
static fsdp_status read_file(ds_set *set, const char *name, ds_reader *read, fsdp_error *err)
{
    int file;
    char *path = fsdp_path_join(set->directory, name);
    if (!path)
        return fsdp_fail_memory(err, name);
    fsdp_status st = fsdp_source_add_file(set->source, path, true, &file, err);
    if (st == FSDP_OK)
        st = read_archive(set, file, read, err);
    fsdp_free(path);
    return st;
}

/* --- model files ------------------------------------------------------------------------------ */

/* Reads the model files of a part: one, or in stage 3 one of each rank. The first part has the values. */
static fsdp_status read_models(ds_set *set, fsdp_error *err)
{
    size_t count;
    const ds_file *files = files_of(&set->files, DS_FILE_MODEL, set->part, &count);
    if (!files)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': the model file of model-parallel rank %d is missing",
                         set->directory, set->part);
    set->is_split = files[0].rank >= 0;
    if (!set->is_split && count > 1 && !set->is_universal) /* whose files are for all stages */
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' has model files of stage 3, such as '%s', next to '%s', which is of "
                         "another stage" FSDP_TWO_SAVES,
                         set->directory, files[1].name, files[0].name);
    if (set->is_split) {
        FSDP_TRY(check_ranks(files, count, set->directory, err));
        set->world = (int64_t)count;
    }
    set->rank = 0;
    FSDP_TRY(read_file(set, files[0].name, ds_read_model, err));
    for (size_t i = 1; i < count; i++) {
        set->rank = files[i].rank;
        FSDP_TRY(read_file(set, files[i].name, ds_read_other_model, err));
    }
    return FSDP_OK;
}

/* === universal checkpoints ==================================================================== */

/*
 * Universal checkpoints: zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt of every parameter,
 * zero/optimizer_state.pt, and the model files of the run next to `zero`.
 *
 * ds_to_universal writes {"param": tensor, "cat_dim": ...} from stages 1 and 2, and from stage 3 a 1-D
 * tensor, whose shape is in param_shapes. It also writes the frozen weights, buffers and tied names of the
 * module, rounded; the model files have them as they are.
 */

static const char folder[] = "zero", optim_file[] = "zero/optimizer_state.pt";
static const char suffix[] = ".pt", master_name[] = "fp32", step_name[] = "step";

static bool is_universal(const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i], folder) == 0)
            return true;
    return false;
}

/* --- one file --------------------------------------------------------------------------------------- */

/* True when the shape can be that of param_shapes, which has that of one rank: tensor parallelism cuts one
 * dim of it, and ds_to_universal takes the padding of the vocabulary off. */
static bool fits_shapes(const ds_set *set, const ds_param *param, const torch_tensor *tensor)
{
    int others = 0;
    if (param->ndim != tensor->ndim)
        return false;
    for (int dim = 0; dim < tensor->ndim; dim++) {
        bool may_be_cut = dim == 0 && set->is_vocabulary;
        if (param->shape[dim] == tensor->shape[dim] ||
            (may_be_cut && tensor->shape[dim] < param->shape[dim]))
            continue;
        others++;
        if (set->tensor_ranks == 1 || tensor->shape[dim] < param->shape[dim])
            return false;
    }
    return others <= 1;
}

static void add_shape(int ndim, const int64_t *shape, fsdp_text *text)
{
    fsdp_text_addf(text, "[");
    for (int dim = 0; dim < ndim; dim++)
        fsdp_text_addf(text, "%s%" PRId64, dim > 0 ? ", " : "", shape[dim]);
    fsdp_text_addf(text, "]");
}

static fsdp_status fail_shape(const ds_set *set, const torch_tensor *tensor, fsdp_error *err)
{
    const ds_param *param = set->param;
    fsdp_text own = {0}, said = {0};
    add_shape(tensor->ndim, tensor->shape, &own);
    add_shape(param->ndim, param->shape, &said);
    fsdp_status st =
        own.failed || said.failed
            ? fsdp_fail_memory(err, "a shape")
            : fsdp_fail(err, FSDP_ERR_DAMAGED,
                        "'%s' has the shape %s, but param_shapes of '%s' says %s" FSDP_TWO_SAVES,
                        fsdp_source_file_path(set->source, (size_t)tensor->storage.file), own.data,
                        set->model_file, said.data);
    fsdp_text_release(&own);
    fsdp_text_release(&said);
    return st;
}

/* The master has the shape: param_shapes has that of one rank of tensor parallelism. */
static fsdp_status take_shape(ds_set *set, ds_param *param, const torch_tensor *tensor,
                              fsdp_error *err)
{
    size_t bytes = (size_t)tensor->ndim * sizeof *tensor->shape;
    if (set->kind == DS_MASTER) {
        fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
        if (param->shape && !fits_shapes(set, param, tensor))
            return fail_shape(set, tensor, err);
        param->shape = fsdp_arena_alloc(&set->arena, (size_t)tensor->ndim, sizeof *tensor->shape);
        if (!param->shape)
            return fsdp_fail_memory(err, "a shape");
        if (tensor->ndim > 0)
            memcpy(param->shape, tensor->shape, bytes);
        param->ndim = tensor->ndim;
        param->count = fsdp_box_count(&whole);
        return FSDP_OK;
    }
    bool fits = param->ndim == tensor->ndim &&
                (tensor->ndim == 0 || memcmp(param->shape, tensor->shape, bytes) == 0);
    return fits ? FSDP_OK
                : fsdp_fail(err, FSDP_ERR_DAMAGED,
                            "'%s': %s of a parameter and its fp32.pt differ in shape",
                            set->directory, set->kinds[set->kind]);
}

static fsdp_status add_whole(ds_set *set, const torch_tensor *tensor, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    fsdp_source_chunk chunk;
    size_t number;
    FSDP_TRY(take_shape(set, set->param, tensor, err));
    FSDP_TRY(ds_param_tensor(set, set->param, set->kind, tensor->dtype, &number, err));
    torch_tensor_chunk(tensor, origin, &chunk);
    return fsdp_source_add_chunk(set->source, number, &chunk, err);
}

static fsdp_status read_state(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    torch_tensor tensor;
    fsdp_node param = ds_member(archive, archive->pickle.root, "param");
    FSDP_TRY(ds_read_tensor(archive, param != 0 ? param : archive->pickle.root, "a parameter",
                            &tensor, err));
    set->is_vocabulary = ds_member(archive, archive->pickle.root, "vocab_tensor") != 0;
    if (param != 0 || !set->param->shape)
        return add_whole(set, &tensor, err);
    if (tensor.ndim != 1 || tensor.shape[0] != set->param->count)
        return ds_bad(archive, "it does not have as many elements as the shape in param_shapes",
                      err);
    if (tensor.shape[0] == 0)
        return add_whole(set, &tensor, err);
    const ds_run all = {0, 0, tensor.shape[0]};
    return ds_place(set, set->param, set->kind, &tensor, &all, err);
}

static fsdp_status read_step(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    return ds_read_step(archive, archive->pickle.root, &set->step, err);
}

/* --- one parameter ---------------------------------------------------------------------------------- */

static bool is_torch_file(void *context, const char *name)
{
    (void)context;
    return fsdp_has_suffix(name, suffix);
}

static int compare_names(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

/* Lists a folder below the directory in a fixed order. */
static fsdp_status list(const ds_set *set, const char *below,
                        bool (*wanted)(void *context, const char *name), fsdp_io_names *names_out,
                        fsdp_error *err)
{
    char *path = fsdp_path_join(set->directory, below);
    if (!path)
        return fsdp_fail_memory(err, below);
    fsdp_status st = fsdp_io_list_names(set->io, path, wanted, NULL, names_out, err);
    if (st == FSDP_OK && names_out->count > 0)
        qsort(names_out->items, names_out->count, sizeof *names_out->items, compare_names);
    fsdp_free(path);
    return st;
}

static fsdp_status read_named(ds_set *set, const char *below, const char *name, ds_reader *read,
                              fsdp_error *err)
{
    fsdp_text path = {0};
    fsdp_text_addf(&path, "%s/%s%s", below, name, suffix);
    fsdp_status st =
        path.failed ? fsdp_fail_memory(err, name) : read_file(set, path.data, read, err);
    fsdp_text_release(&path);
    return st;
}

/* Reads the master first, because it has the shape. */
static fsdp_status read_files(ds_set *set, const char *below, const fsdp_io_names *names,
                              bool *has_step_out, fsdp_error *err)
{
    *has_step_out = false;
    set->kind = DS_MASTER;
    FSDP_TRY(read_named(set, below, master_name, read_state, err));
    for (size_t i = 0; i < names->count; i++) {
        char *name = names->items[i];
        size_t size = strlen(name) - (sizeof suffix - 1);
        name[size] = '\0';
        *has_step_out |= strcmp(name, step_name) == 0;
        if (strcmp(name, step_name) == 0 || strcmp(name, master_name) == 0)
            continue;
        FSDP_TRY(ds_kind(set, name, size, &set->kind, err));
        FSDP_TRY(read_named(set, below, name, read_state, err));
    }
    return FSDP_OK;
}

/* Reads the step of the parameter, and keeps the first one of its group. A listing has no others. */
static fsdp_status take_step(ds_set *set, const char *below, fsdp_value *first, fsdp_error *err)
{
    bool is_first = first->kind == FSDP_VALUE_NULL;
    if (!is_first && set->is_as_stored)
        return FSDP_OK;
    FSDP_TRY(read_named(set, below, step_name, read_step, err));
    set->param->has_step = ds_is_number(&set->step, &set->param->step);
    fsdp_value unused = is_first ? (fsdp_value){0} : set->step;
    if (is_first)
        *first = set->step;
    set->step = (fsdp_value){0};
    fsdp_value_release(&unused);
    return FSDP_OK;
}

/* True when the model files are those of all stages, as fsdp-convert writes them: param_shapes has the
 * trained weights alone. ds_to_universal leaves the files of one stage. */
static bool has_all_stages(const ds_set *set)
{
    size_t count;
    const ds_file *files = files_of(&set->files, DS_FILE_MODEL, 0, &count);
    return files && files[0].rank < 0 && files[count - 1].rank >= 0;
}

/* A folder of no parameter is of a weight that the module has, or that was not trained. */
static fsdp_status check_named(const ds_set *set, const fsdp_io_names *files, fsdp_error *err)
{
    const ds_param *param = set->param;
    char shown[200];
    if (param->shape || !set->model_file || (has_all_stages(set) && files->count == 1) ||
        fsdp_name_table_find(&set->module, param->name, param->name_size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s/%s/%s' is a parameter, but neither param_shapes nor the module of '%s' "
                     "has it" FSDP_TWO_SAVES,
                     set->directory, folder,
                     fsdp_printable(param->name, param->name_size, shown, sizeof shown),
                     set->model_file);
}

/* Reads the folder of a parameter; step_out (may be NULL) gets the first step of its group. */
static fsdp_status read_param(ds_set *set, ds_param *param, fsdp_value *step_out, fsdp_error *err)
{
    fsdp_text below = {0};
    fsdp_io_names names = {0};
    bool has_step = false;
    fsdp_text_addf(&below, "%s/", folder);
    fsdp_text_add(&below, param->name, param->name_size);
    if (below.failed || memchr(param->name, '\0', param->name_size)) {
        fsdp_text_release(&below);
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': the name of a parameter is not a valid folder name",
                         set->directory);
    }
    set->param = param;
    fsdp_status st = list(set, below.data, is_torch_file, &names, err);
    if (st == FSDP_OK)
        st = check_named(set, &names, err);
    if (st == FSDP_OK)
        st = read_files(set, below.data, &names, &has_step, err);
    if (st == FSDP_OK && has_step && step_out)
        st = take_step(set, below.data, step_out, err);
    fsdp_io_names_release(&names);
    fsdp_text_release(&below);
    return st;
}

/* --- all parameters --------------------------------------------------------------------------------- */

static fsdp_status read_group(ds_set *set, ds_lane *lane, fsdp_value *step, fsdp_error *err)
{
    for (size_t i = 0; i < lane->count; i++)
        if (!lane->params[i].is_copy)
            FSDP_TRY(read_param(set, &lane->params[i], step, err));
    return FSDP_OK;
}

/* Reads the parameters of param_shapes, and one step per group. */
static fsdp_status read_groups(ds_set *set, fsdp_error *err)
{
    fsdp_value steps = {0};
    FSDP_TRY(fsdp_value_set_items(&steps, FSDP_VALUE_LIST, set->group_count, err));
    fsdp_status st = FSDP_OK;
    for (size_t g = 0; g < set->group_count && st == FSDP_OK; g++)
        st = read_group(set, set->groups[g].lanes, &steps.as.list.items[g], err);
    if (st == FSDP_OK && set->part == 0)
        st = ds_add_step_list(set, &steps, err);
    if (st == FSDP_OK)
        st = ds_note_owners(set, err);
    fsdp_value_release(&steps);
    return st;
}

/* True for a folder whose contents the model files have, or that is another name of a tied weight. */
static bool is_known(const ds_set *set, const fsdp_name_table *tied, const char *name)
{
    size_t size = strlen(name);
    return fsdp_source_has(set->source, name, size) || fsdp_name_table_find(tied, name, size) ||
           fsdp_name_table_find(&set->buffers, name, size);
}

static fsdp_status read_folder(ds_set *set, const char *name, fsdp_error *err)
{
    ds_param param = {.name = fsdp_arena_strndup(&set->arena, name, strlen(name)),
                      .name_size = strlen(name)};
    return param.name ? read_param(set, &param, NULL, err) : fsdp_fail_memory(err, "a name");
}

/* Reads the folders of weights that are not parameters of param_shapes. */
static fsdp_status read_others(ds_set *set, fsdp_error *err)
{
    fsdp_io_names names = {0};
    fsdp_name_table tied = {0};
    fsdp_status st = list(set, folder, NULL, &names, err);
    for (size_t i = 0; i < set->tied_count && st == FSDP_OK; i++)
        if (!fsdp_name_table_enter(&tied, set->tied[i].name, set->tied[i].name_size, i))
            st = fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < names.count && st == FSDP_OK; i++)
        if (!is_torch_file(NULL, names.items[i]) && !is_known(set, &tied, names.items[i]))
            st = read_folder(set, names.items[i], err);
    fsdp_name_table_release(&tied);
    fsdp_io_names_release(&names);
    return st;
}

/* --- the optimizer ---------------------------------------------------------------------------------- */

/* From stage 3 it has the states of one rank, too, of which only the steps are of all ranks. They count where
 * no parameter has a step of its own. */
static fsdp_status read_optim(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    fsdp_node root = archive->pickle.root;
    ds_members states =
        ds_members_of(archive, ds_member(archive, ds_base_state(archive, root), "state"));
    fsdp_node *nodes = fsdp_alloc(states.count / 2, sizeof *nodes);
    if (!nodes)
        return fsdp_fail_memory(err, "the states of an optimizer");
    for (size_t i = 0; i < states.count; i += 2)
        nodes[i / 2] = states.items[i + 1];
    fsdp_status st = ds_add_optim_values(set, archive, root, err);
    if (st == FSDP_OK && set->steps.kind == FSDP_VALUE_NULL)
        st = ds_add_steps(set, archive, nodes, states.count / 2, err);
    fsdp_free(nodes);
    return st;
}

static bool has_optim(const ds_set *set)
{
    char *path = fsdp_path_join(set->directory, optim_file);
    bool has = path && fsdp_io_exists(set->io, path);
    fsdp_free(path);
    return has;
}

static fsdp_status read_universal(ds_set *set, fsdp_error *err)
{
    size_t count;
    set->is_universal = true;
    for (set->part = 0; files_of(&set->files, DS_FILE_MODEL, set->part, &count); set->part++) {
        FSDP_TRY(read_models(set, err));
        FSDP_TRY(read_groups(set, err));
    }
    FSDP_TRY(read_others(set, err));
    set->part = set->rank = 0;
    return has_optim(set) ? read_file(set, optim_file, read_optim, err) : FSDP_OK;
}

/* === a tag ==================================================================================== */

enum { BITS_OF_ZIP = 48, BITS_OF_LEGACY = 41, HEAD_BYTES = 16 };

/* --- recognition ---------------------------------------------------------------------------------- */

static int bid_file(fsdp_io *io, const char *path)
{
    fsdp_file *file = NULL;
    uint8_t head[HEAD_BYTES] = {0};
    int64_t size = 0;
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) != 0 || info.kind != FSDP_FILE_REGULAR ||
        fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL) != FSDP_OK)
        return 0;
    bool is_read = file->ops->size(file, &size) == 0 && size >= HEAD_BYTES &&
                   fsdp_io_read(file, path, head, sizeof head, 0, NULL) == FSDP_OK;
    (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    if (is_read && memcmp(head, "PK\3\4", 4) == 0)
        return BITS_OF_ZIP;
    return is_read && torch_legacy_begins(head, sizeof head) ? BITS_OF_LEGACY : 0;
}

static int bid(const fsdp_probe *probe)
{
    ds_files files = {0};
    size_t count;
    int bits = 0;
    if (!probe->is_directory)
        return 0;
    fsdp_error why = {0}; /* two files of one rank are reported by open */
    (void)find_files(probe->names, probe->name_count, &files, &why);
    const ds_file *first = files_of(&files, DS_FILE_MODEL, -1, &count);
    if (!first)
        first = files_of(&files, DS_FILE_OPTIM, -1, &count);
    char *path = first ? fsdp_path_join(probe->path, first->name) : NULL;
    if (path)
        bits = bid_file(probe->io, path);
    fsdp_free(path);
    fsdp_free(files.items);
    return bits;
}

/* --- the source ----------------------------------------------------------------------------------- */

typedef struct ds_state {
    fsdp_source *source;
    torch_memory *memory;
    ds_widened *widened; /* sorted by tensor */
    size_t widened_count;
} ds_state;

static int compare_widened(const void *key, const void *item)
{
    size_t tensor = *(const size_t *)key, other = ((const ds_widened *)item)->tensor;
    return (tensor > other) - (tensor < other);
}

/* The buffers of a model are small. */
static fsdp_status read_widened(const ds_state *state, const ds_widened *widened,
                                const fsdp_box *box, void *data, fsdp_error *err)
{
    fsdp_source_reader reader = {0};
    fsdp_dtype dtype = fsdp_source_tensor_at(state->source, widened->stored)->dtype;
    size_t count = (size_t)fsdp_box_count(box);
    void *stored = fsdp_alloc(count, fsdp_dtype_size(dtype));
    if (!stored)
        return fsdp_fail_memory(err, "a buffer");
    fsdp_status st = fsdp_source_read(state->source, widened->stored, box, stored, &reader, err);
    fsdp_source_reader_release(&reader);
    if (st == FSDP_OK)
        fsdp_kernels_get()->cast(data, FSDP_F32, stored, dtype, count, FSDP_OVERFLOW_INF);
    fsdp_free(stored);
    return st;
}

static fsdp_status read_tensor(void *context, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const ds_state *state = context;
    const ds_widened *widened = state->widened_count == 0
                                    ? NULL
                                    : bsearch(&tensor, state->widened, state->widened_count,
                                              sizeof *widened, compare_widened);
    return widened ? read_widened(state, widened, box, data, err)
                   : torch_memory_read(state->memory, state->source, tensor, box, data, err);
}

static void close_state(void *context)
{
    ds_state *state = context;
    torch_memory_close(state->memory);
    fsdp_free(state->widened);
    fsdp_free(state);
}

static const fsdp_source_ops ds_ops = {.read = read_tensor, .close = close_state};

static fsdp_status create(const fsdp_probe *probe, ds_set *set, ds_state **state_out,
                          fsdp_error *err)
{
    ds_state *state = fsdp_alloc(1, sizeof *state);
    if (!state)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = torch_memory_create(&state->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(probe->io, probe->path, "deepspeed", &set->source, err);
    if (st != FSDP_OK) {
        close_state(state);
        return st;
    }
    state->source = set->source;
    set->memory = state->memory;
    fsdp_source_tolerate(set->source, probe->opts);
    fsdp_source_set_ops(set->source, &ds_ops, state);
    *state_out = state;
    return FSDP_OK;
}

/* --- files ---------------------------------------------------------------------------------------- */

/* Compares the number of files with that of the ranks in the model file. */
static fsdp_status agree_world(const ds_set *set, fsdp_error *err)
{
    if (set->data_ranks == 0 || set->data_ranks == set->world)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' says that dp_world_size is %" PRId64
                     ", but '%s' has optimizer files of %" PRId64 " ranks" FSDP_TWO_SAVES,
                     set->model_file, set->data_ranks, set->directory, set->world);
}

static fsdp_status read_optims(ds_set *set, fsdp_error *err)
{
    size_t count, others;
    const ds_file *files = files_of(&set->files, DS_FILE_OPTIM, set->part, &count);
    if (!files && files_of(&set->files, DS_FILE_LAYER, -1, &others) &&
        !files_of(&set->files, DS_FILE_OPTIM, -1, &others))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' has no optimizer files: a pipeline without ZeRO, whose stages have "
                         "their optimizers in model files, is not supported; save it with stage 1",
                         set->directory);
    if (!files)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': the optimizer file of model-parallel rank %d is missing: it has "
                         "the weights in f32",
                         set->directory, set->part);
    FSDP_TRY(check_ranks(files, count, set->directory, err));
    if (set->is_split && set->world != (int64_t)count)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' has model files of %" PRId64 " ranks and optimizer files of %zu: the "
            "%s file of rank %" PRId64 " is missing, and with it a part of every tensor",
            set->directory, set->world, count, set->world > (int64_t)count ? "optimizer" : "model",
            set->world > (int64_t)count ? (int64_t)count : set->world);
    set->world = (int64_t)count;
    for (size_t i = 0; i < count; i++) {
        set->rank = files[i].rank;
        FSDP_TRY(read_file(set, files[i].name, ds_read_optim, err));
    }
    FSDP_TRY(agree_world(set, err));
    if (!set->is_split)
        FSDP_TRY(ds_split_end(set, err));
    return ds_note_owners(set, err);
}

/* A part is one stage of a pipeline. Parts of tensor parallelism have pieces of the same parameters. */
static fsdp_status check_parts(const ds_set *set, int *parts_out, fsdp_error *err)
{
    size_t count, layers;
    const ds_file *layer = files_of(&set->files, DS_FILE_LAYER, -1, &layers);
    int parts = 0;
    for (size_t i = 0; i < set->files.count; i++) {
        const ds_file *file = &set->files.items[i];
        bool is_of_part = file->kind == DS_FILE_MODEL || file->kind == DS_FILE_OPTIM;
        parts = is_of_part && file->part >= parts ? file->part + 1 : parts;
    }
    *parts_out = parts;
    bool is_tensor_parallel = parts > 1 && layers == 0;
    for (size_t i = 0; i < layers; i++)
        is_tensor_parallel |= layer[i].part > 0;
    if (is_tensor_parallel)
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "'%s': its parameters are cut for tensor parallelism; "
            "join them with deepspeed.checkpoint.ds_to_universal and convert its result",
            set->directory);
    if (files_of(&set->files, DS_FILE_EXPERT_OPTIM, -1, &count))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': the optimizer of its experts is in separate files, which are not "
                         "supported; train with ZeRO",
                         set->directory);
    return FSDP_OK;
}

/* Reads all files of layers or experts. */
static fsdp_status read_all(ds_set *set, ds_file_kind kind, ds_reader *read, fsdp_error *err)
{
    size_t count;
    const ds_file *files = files_of(&set->files, kind, -1, &count);
    for (size_t i = 0; i < count; i++) {
        set->layer = kind == DS_FILE_LAYER ? files[i].layer : -1;
        FSDP_TRY(read_file(set, files[i].name, read, err));
    }
    return FSDP_OK;
}

static fsdp_status read_parts(ds_set *set, fsdp_error *err)
{
    size_t optims;
    int parts;
    FSDP_TRY(check_parts(set, &parts, err));
    (void)files_of(&set->files, DS_FILE_OPTIM, -1, &optims);
    FSDP_TRY(read_all(set, DS_FILE_LAYER, ds_note_weights, err));
    FSDP_TRY(read_all(set, DS_FILE_EXPERT, ds_note_weights, err));
    for (set->part = 0; set->part < parts; set->part++) {
        FSDP_TRY(read_models(set, err));
        if (set->is_plain && optims > 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' has optimizer files, but its model file has no param_shapes",
                             set->directory);
        if (!set->is_plain)
            FSDP_TRY(read_optims(set, err));
    }
    set->part = 0;
    return set->buffers.count > 0 ? read_all(set, DS_FILE_LAYER, ds_read_layer, err) : FSDP_OK;
}

/* Adds the further names of tensors that were noted. */
static fsdp_status add_tied(ds_set *set, fsdp_error *err)
{
    for (size_t i = 0; i < set->tied_count; i++) {
        const ds_tied *tied = &set->tied[i];
        const uint64_t *found =
            fsdp_name_table_find(&set->tensors, tied->stored, tied->stored_size);
        /* Frozen weights that were not saved are missing under all of their names. */
        if (!found || fsdp_source_has(set->source, tied->name, tied->name_size))
            continue;
        size_t tensor = (size_t)*found;
        const int32_t whole = (int32_t)tied->name_size;
        fsdp_source_nest(set->source, &whole, 1);
        fsdp_status st =
            fsdp_source_add_alias(set->source, tied->name, tied->name_size, tensor, err);
        fsdp_source_nest(set->source, NULL, 0);
        FSDP_TRY(st);
        if (!fsdp_name_table_enter(&set->tensors, tied->name, tied->name_size, tensor))
            return fsdp_fail_memory(err, "tied weights");
    }
    return FSDP_OK;
}

static fsdp_status read_set(const fsdp_probe *probe, ds_set *set, fsdp_error *err)
{
    ds_state *state = NULL;
    FSDP_TRY(create(probe, set, &state, err));
    fsdp_status st = find_files(probe->names, probe->name_count, &set->files, err);
    if (st == FSDP_OK)
        st = is_universal(probe->names, probe->name_count) ? read_universal(set, err)
                                                           : read_parts(set, err);
    if (st == FSDP_OK)
        st = ds_add_resume(set, err);
    if (st == FSDP_OK)
        st = add_tied(set, err);
    state->widened = set->widened;
    state->widened_count = set->widened_count;
    set->widened = NULL;
    if (st == FSDP_OK)
        st = fsdp_source_complete(set->source, err);
    if (st != FSDP_OK) {
        fsdp_source_close(set->source);
        set->source = NULL;
    }
    return st;
}

static fsdp_status open_deepspeed(const fsdp_probe *probe, fsdp_source **source_out,
                                  fsdp_error *err)
{
    ds_set set = {.io = probe->io,
                  .directory = probe->path,
                  .kinds = {""},
                  .kind_count = 1,
                  .is_as_stored = probe->opts && probe->opts->as_stored,
                  .is_chosen = probe->opts && probe->opts->format};
    fsdp_status st = read_set(probe, &set, err);
    *source_out = set.source;
    fsdp_free(set.files.items);
    fsdp_name_table_release(&set.tensors);
    fsdp_name_table_release(&set.buffers);
    fsdp_name_table_release(&set.prints);
    fsdp_name_table_release(&set.module);
    fsdp_name_table_release(&set.outside);
    fsdp_facts_release(&set.facts);
    fsdp_text_release(&set.print);
    fsdp_free(set.weights);
    fsdp_free(set.tied);
    fsdp_free(set.widened);
    fsdp_free(set.owners);
    fsdp_value_release(&set.step);
    fsdp_value_release(&set.steps);
    fsdp_value_release(&set.param_groups);
    fsdp_arena_release(&set.arena);
    return st;
}

const fsdp_format fsdp_format_deepspeed = {
    .name = "deepspeed",
    .reads_directory = true,
    .caps = {.only_model = true, .only_tensors = true, .repeats = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_deepspeed}};
