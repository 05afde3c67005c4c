/*
 * Rank files as a source: a directory of them, or a pattern. See ranks.h for the order of the
 * files.
 */
#include "formats/ranks/ranks.h"

#include <stdio.h>
#include <string.h>

enum { BITS_OF_SET = 40, HEAD_BYTES = 64 << 10, PATTERNS_SHOWN = 6 };

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool fsdp_source_is_pattern(const char *path)
{
    return strstr(last_part(path), "{r}") != NULL;
}

/* --- recognition -------------------------------------------------------------------------------- */

static bool holds_word(const char *data, size_t size, const char *word)
{
    return memmem(data, size, word, strlen(word)) != NULL;
}

/* True for a torch.save file whose name states a rank, or whose pickle mentions distributed
 * tensors. */
static bool is_rank_file(fsdp_io *io, const char *path, bool says_rank)
{
    fsdp_file *file = NULL;
    int64_t size = 0;
    char *head = fsdp_alloc(HEAD_BYTES, 1);
    fsdp_file_info info;
    bool is_ours = head && io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_REGULAR &&
                   fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL) == FSDP_OK &&
                   file->ops->size(file, &size) == 0;
    size_t read = size < HEAD_BYTES ? (size_t)size : HEAD_BYTES;
    if (is_ours && fsdp_io_read(file, path, head, read, 0, NULL) == FSDP_OK) {
        is_ours = (read >= 4 && memcmp(head, "PK\3\4", 4) == 0) ||
                  torch_legacy_begins((const uint8_t *)head, read);
        is_ours = is_ours && (says_rank || holds_word(head, read, "DTensor") ||
                              holds_word(head, read, "ShardedTensor"));
    }
    if (file)
        (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    fsdp_free(head);
    return is_ours;
}

/* DeepSpeed numbers its shards by rank, too; they have another format. */
static bool is_deepspeed(const rank_group *group)
{
    return strstr(group->pattern, "mp_rank_") || strstr(group->pattern, "zero_pp_rank_");
}

static bool is_set(const fsdp_probe *probe, const rank_group *group)
{
    if (is_deepspeed(group))
        return false;
    char *path = fsdp_path_join(probe->path, group->files[0].name);
    bool is_ours = path && is_rank_file(probe->io, path, group->says_rank);
    fsdp_free(path);
    return is_ours;
}

/* Keeps the groups that are rank files. */
static void keep_sets(const fsdp_probe *probe, rank_names *names)
{
    size_t kept = 0;
    for (size_t i = 0; i < names->count; i++) {
        rank_group group = names->groups[i];
        if (is_set(probe, &group))
            names->groups[kept++] = group;
        else
            fsdp_free(group.files);
    }
    names->count = kept;
}

static int bid(const fsdp_probe *probe)
{
    rank_names names;
    if (!probe->is_directory ||
        rank_names_group(probe->names, probe->name_count, NULL, &names, NULL) != FSDP_OK)
        return 0;
    keep_sets(probe, &names);
    bool is_ours = names.count > 0;
    rank_names_release(&names);
    return is_ours ? BITS_OF_SET : 0;
}

/* --- choosing a group --------------------------------------------------------------------------- */

static fsdp_status fail_several(const fsdp_probe *probe, const char *directory,
                                const rank_names *names, fsdp_error *err)
{
    fsdp_text text = {0};
    for (size_t i = 0; i < names->count && i < PATTERNS_SHOWN; i++)
        fsdp_text_addf(&text, "%s '%s%s%s'", i > 0 ? "," : "", directory,
                       *directory != '\0' && directory[strlen(directory) - 1] != '/' ? "/" : "",
                       names->groups[i].pattern);
    if (names->count > PATTERNS_SHOWN)
        fsdp_text_addf(&text, " and %zu more", names->count - PATTERNS_SHOWN);
    fsdp_status st = text.failed
                         ? fsdp_fail_memory(err, probe->path)
                         : fsdp_fail(err, FSDP_ERR_USAGE,
                                     "'%s' stands for %zu sets of rank files; give the pattern of "
                                     "one of them:%s",
                                     probe->path, names->count, text.data);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status check_group(const rank_group *group, fsdp_error *err)
{
    for (size_t i = 1; i < group->count; i++)
        if (group->files[i].rank == group->files[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' and '%s' are both of rank %d",
                             group->files[i - 1].name, group->files[i].name, group->files[i].rank);
    return FSDP_OK;
}

static fsdp_status find_set(const fsdp_probe *probe, const char *directory, rank_names *names,
                            fsdp_error *err)
{
    const char *pattern = probe->is_directory ? NULL : last_part(probe->path);
    FSDP_TRY(rank_names_group(probe->names, probe->name_count, pattern, names, err));
    if (!pattern)
        keep_sets(probe, names);
    fsdp_status st = FSDP_OK;
    if (names->count == 0)
        st =
            fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                      pattern ? "no file is named as '%s' says" : "'%s' holds no set of rank files",
                      probe->path);
    else if (names->count > 1)
        st = fail_several(probe, directory, names, err);
    else
        st = check_group(&names->groups[0], err);
    if (st != FSDP_OK)
        rank_names_release(names);
    return st;
}

/* --- the source --------------------------------------------------------------------------------- */

typedef struct ranks_state {
    fsdp_source *source;
    torch_memory *memory;
} ranks_state;

static fsdp_status read_tensor(void *context, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const ranks_state *state = context;
    return torch_memory_read(state->memory, state->source, tensor, box, data, err);
}

static void close_state(void *context)
{
    ranks_state *state = context;
    torch_memory_close(state->memory);
    fsdp_free(state);
}

static const fsdp_source_ops ranks_ops = {.read = read_tensor, .close = close_state};

static fsdp_status create(const fsdp_probe *probe, rank_files *set, fsdp_error *err)
{
    ranks_state *state = fsdp_alloc(1, sizeof *state);
    if (!state)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = torch_memory_create(&state->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(probe->io, probe->path, "ranks", &set->source, err);
    if (st != FSDP_OK) {
        close_state(state);
        return st;
    }
    state->source = set->source;
    fsdp_source_tolerate(set->source, probe->opts);
    set->memory = state->memory;
    fsdp_source_set_ops(set->source, &ranks_ops, state);
    return FSDP_OK;
}

static fsdp_status walk_file(rank_files *set, int file, fsdp_error *err)
{
    const torch_visitor visitor = {.context = set,
                                   .tensor =
                                       set->parts.count > 0 ? rank_files_part : rank_files_tensor,
                                   .distributed = rank_files_distributed,
                                   .object = rank_files_object,
                                   .value = rank_files_value};
    torch_archive archive;
    const char *path = fsdp_source_file_path(set->source, (size_t)file);
    set->path = path;
    fsdp_text where = {0};
    fsdp_text_addf(&where, "'%s'", path);
    if (where.failed)
        return fsdp_fail_memory(err, path);
    torch_opening opening = {.source = set->source,
                             .memory = set->memory,
                             .file = file,
                             .stream = FSDP_NO_STREAM,
                             .where = where.data};
    fsdp_status st = torch_file_open(&opening, &archive, err);
    if (st == FSDP_OK)
        st = torch_walk(&archive, &visitor, err);
    torch_archive_release(&archive);
    fsdp_text_release(&where);
    return st;
}

static fsdp_status read_file(rank_files *set, const char *directory, const rank_file *of,
                             bool beneath, fsdp_error *err)
{
    int file;
    char *path = fsdp_path_join(directory, of->name);
    if (!path)
        return fsdp_fail_memory(err, of->name);
    set->rank = of->rank;
    set->seen_count = 0;
    set->is_placed = false;
    fsdp_status st = fsdp_source_add_file(set->source, path, beneath, &file, err);
    if (st == FSDP_OK) {
        set->bytes += fsdp_source_file_size(set->source, (size_t)file);
        st = walk_file(set, file, err);
    }
    fsdp_free(path);
    return st;
}

static void release(rank_files *set)
{
    for (size_t i = 1; i < set->entry_count; i++) {
        for (int reading = 0; reading < RANK_READINGS; reading++)
            fsdp_free(set->entries[i].readings[reading].items);
        rank_items_release(&set->entries[i]);
    }
    for (size_t i = 0; i < set->mesh_count; i++)
        fsdp_free(set->meshes[i].ranks);
    fsdp_free(set->entries);
    fsdp_free(set->meshes);
    fsdp_free(set->members);
    fsdp_free(set->seen);
    fsdp_free(set->flats);
    fsdp_free(set->ties);
    fsdp_name_table_release(&set->names);
    fsdp_facts_release(&set->facts);
    fsdp_arena_release(&set->arena);
}

static fsdp_status read_set(const fsdp_probe *probe, const char *directory, rank_files *set,
                            fsdp_error *err)
{
    FSDP_TRY(create(probe, set, err));
    fsdp_status st =
        rank_parts_are(set->group->pattern) ? rank_parts_read(probe, directory, set, err) : FSDP_OK;
    for (size_t i = 0; i < set->group->count && st == FSDP_OK; i++)
        st = read_file(set, directory, &set->group->files[i], probe->is_directory, err);
    if (st == FSDP_OK)
        st = rank_files_merge(set, probe->opts ? probe->opts->model : NULL, err);
    if (st == FSDP_OK)
        st = fsdp_source_complete(set->source, err);
    if (st != FSDP_OK) {
        fsdp_source_close(set->source);
        set->source = NULL;
    }
    return st;
}

static fsdp_status open_set(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    size_t stem =
        probe->is_directory ? strlen(probe->path) : (size_t)(last_part(probe->path) - probe->path);
    char *directory = stem > 0 ? fsdp_strndup(probe->path, stem) : fsdp_strndup(".", 1);
    rank_names names;
    *source_out = NULL;
    if (!directory)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = find_set(probe, stem > 0 ? directory : "", &names, err);
    if (st == FSDP_OK) {
        rank_files set = {.where = probe->path, .group = &names.groups[0]};
        st = read_set(probe, directory, &set, err);
        *source_out = set.source;
        release(&set);
        rank_names_release(&names);
    }
    fsdp_free(directory);
    return st;
}

const fsdp_format fsdp_format_ranks = {
    .name = "ranks",
    .reads_directory = true,
    .caps = {.tuples = true, .patterns = true, .takes_model = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_set}};
