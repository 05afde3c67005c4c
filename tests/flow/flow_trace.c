/*
 * The straight line, traced: a small uneven tensor is saved by 2 ranks, also in the background of
 * a training, and loaded by 3, and what each step tells must be what docs/flow_save.md and
 * docs/flow_load.md say; a conversion of it must be what docs/flow_convert.md says. The pages are the golden
 * files: their blocks fenced with ```flow NAME hold the lines. The 3 ranks of the load have an
 * address space each, as under MPI; threads of one process would share their reads.
 *
 * usage: flow_trace REPOSITORY [--update]     (--update writes the blocks anew)
 */
#include "base/data/flow.h"
#include "base/text.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/ranks/worlds.h"

#include <fsdp/fsdp.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_LINES = 400, LINE_ROOM = 600, MAX_STEPS = 8, ROWS = 5, COLUMNS = 4 };

typedef struct line {
    int rank;
    char step[64];
    char text[LINE_ROOM];
} line;

typedef struct trace {
    line lines[MAX_LINES];
    int count;
} trace;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static trace now;
static char folder[64];
static _Thread_local int own_rank;
static int problems;

static void report_problem(const char *what, const char *detail)
{
    fprintf(stderr, "%s: %s\n", what, detail);
    problems++;
}

/* --- recording ----------------------------------------------------------------------------------- */

static void cut(char *from, size_t size)
{
    memmove(from, from + size, strlen(from + size) + 1);
}

/* Folder names and the staging's random digits differ from run to run. */
static void make_repeatable(char *text)
{
    size_t size = strlen(folder);
    for (char *at; (at = strstr(text, folder));) {
        bool is_all = at[size] != '/';
        at[0] = '.';
        cut(at + is_all, size + 1 - 2 * is_all);
    }
    for (char *at = text; (at = strstr(at, ".tmp-"));) {
        size_t digits = strspn(at + 5, "0123456789abcdef");
        memcpy(at, ".tmp-UUID", 9);
        cut(at + 9, digits - 4);
        at += 9;
    }
}

static void record(void *user, const char *step, const char *text)
{
    trace *all = user;
    static const char background[] = "save in the background: rank ";
    if (strncmp(text, background, sizeof background - 1) == 0)
        own_rank = atoi(text + sizeof background - 1); /* a thread next to the rank's */
    pthread_mutex_lock(&lock);
    if (all->count < MAX_LINES) {
        line *next = &all->lines[all->count++];
        next->rank = own_rank;
        snprintf(next->step, sizeof next->step, "%s", step);
        snprintf(next->text, sizeof next->text, "%s", text);
        make_repeatable(next->text);
    }
    pthread_mutex_unlock(&lock);
}

/* --- the work ------------------------------------------------------------------------------------ */

typedef fsdp_status (*rank_work)(fsdp_sd *sd, fsdp_ctl *ctl, const char *path, fsdp_error *err);

static fsdp_status save(fsdp_sd *sd, fsdp_ctl *ctl, const char *path, fsdp_error *err)
{
    fsdp_save_opts opts = {0};
    opts.threads = 1;
    float *data = fsdp_sd_at(sd, 0)->data;
    for (int i = 0; i < ROWS * COLUMNS; i++)
        data[i] = (float)(100 * fsdp_ctl_rank(ctl) + i);
    return fsdp_sd_save(sd, ctl, path, &opts, err);
}

/* Ranks 0 and 1 of 2 saved rows 0..2 and 3..4; of 3 ranks each wants two rows, the last one row. */
static fsdp_status load(fsdp_sd *sd, fsdp_ctl *ctl, const char *path, fsdp_error *err)
{
    static const float rows[ROWS] = {0, 4, 8, 100, 104};
    fsdp_load_opts opts = {.threads = 1};
    fsdp_ctl_ops apart = *ctl->ops;
    const fsdp_ctl_ops *shared = ctl->ops;
    apart.shares_memory = false;
    ctl->ops = &apart;
    fsdp_status st = fsdp_sd_load(sd, ctl, path, &opts, err);
    ctl->ops = shared;
    const float *data = fsdp_sd_at(sd, 0)->data;
    int first = 2 * fsdp_ctl_rank(ctl), end = first + 2 < ROWS ? first + 2 : ROWS;
    for (int i = 0; st == FSDP_OK && i < (end - first) * COLUMNS; i++)
        if (data[i] != rows[first + i / COLUMNS] + (float)(i % COLUMNS))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "element %d is wrong", i);
    return st;
}

/* The checkpoint of the 2 ranks becomes one of DCP, which is then converted with the watcher on. */
static void convert(void)
{
    fsdp_error err = {0};
    fsdp_flow_watcher watcher = {record, &now};
    char native[100], dcp[100], hf[100];
    fsdp_convert_opts opts = {.format = "dcp", .threads = 1};
    snprintf(native, sizeof native, "%s/ckpt", folder);
    snprintf(dcp, sizeof dcp, "%s/dcp", folder);
    snprintf(hf, sizeof hf, "%s/hf", folder);
    fsdp_status st = fsdp_checkpoint_convert(native, dcp, &opts, &err);
    now.count = 0;
    opts.format = "hf";
    fsdp_flow_watch(&watcher);
    if (st == FSDP_OK)
        st = fsdp_checkpoint_convert(dcp, hf, &opts, &err);
    fsdp_flow_watch(NULL);
    if (st != FSDP_OK)
        report_problem("the conversion failed", err.text);
}

typedef struct job {
    rank_work work;
    char path[100];
} job;

static fsdp_status run_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const job *own = user;
    float data[ROWS * COLUMNS] = {0};
    fsdp_sd *sd = NULL;
    fsdp_mesh *mesh = NULL;
    fsdp_placement rows = {.kind = FSDP_SHARD};
    own_rank = fsdp_ctl_rank(ctl);
    int64_t ranks = fsdp_ctl_size(ctl), shape[] = {ROWS, COLUMNS};
    fsdp_status st = fsdp_mesh_create(1, &ranks, (const char *[]){"dp"}, NULL, &mesh, err);
    if (st == FSDP_OK)
        st = fsdp_sd_create(&sd, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_tensor(
            sd, FSDP_NAME("weight"),
            &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = mesh, .placement = {rows}}, data}, err);
    if (st == FSDP_OK)
        st = own->work(sd, ctl, own->path, err);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
    return st;
}

static void run(int ranks, rank_work work)
{
    fsdp_error err = {0};
    fsdp_flow_watcher watcher = {record, &now};
    job own = {.work = work};
    now.count = 0;
    snprintf(own.path, sizeof own.path, "%s/ckpt", folder);
    fsdp_flow_watch(&watcher);
    fsdp_status st = fsdp_ctl_run_threads(ranks, run_rank, &own, &err);
    fsdp_flow_watch(NULL);
    if (st != FSDP_OK)
        report_problem("the operation failed", err.text);
}

/* Saves in the background, with a root whose one parameter is the tensor. */
static fsdp_status save_root(fsdp_root *root, fsdp_error *err)
{
    char path[100];
    fsdp_async_saver *saver = NULL;
    snprintf(path, sizeof path, "%s/background", folder);
    FSDP_TRY(fsdp_async_saver_create(root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_save(saver, path, NULL, err));
    fsdp_status st = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    return st;
}

static fsdp_status run_world_rank(world_rank *rank, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL;
    fsdp_model *model = NULL;
    fsdp_root *root = NULL;
    const int64_t ranks = fsdp_world_size(rank->world), shape[] = {ROWS, COLUMNS};
    const fsdp_param_spec weight = {.name = "weight", .dtype = FSDP_F32, .ndim = 2, .shape = shape};
    own_rank = fsdp_world_rank(rank->world);
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &ranks, (const char *[]){"dp"}, &mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &model, err));
    FSDP_TRY(fsdp_model_add(model, &weight, NULL, err));
    FSDP_TRY(fsdp_root_create(model, &(fsdp_unit_opts){.mesh = mesh}, &root, err));
    fsdp_status st = save_root(root, err);
    fsdp_root_free(root);
    fsdp_model_free(model);
    fsdp_mesh_free(mesh);
    return st;
}

static void run_background(void)
{
    fsdp_error err = {0};
    fsdp_flow_watcher watcher = {record, &now};
    now.count = 0;
    fsdp_flow_watch(&watcher);
    fsdp_status st = run_worlds(2, "cpu", run_world_rank, NULL, &err);
    fsdp_flow_watch(NULL);
    if (st != FSDP_OK)
        report_problem("the save in the background failed", err.text);
}

/* --- the rules ----------------------------------------------------------------------------------- */

/* Steps of docs/architecture.md, and the step of the other direction. */
static const struct step {
    const char *file;
    int level;
    const char *mirror;
} steps[] = {
    {"runtime/staging/snapshot.c", 1, NULL},
    {"runtime/background/async_save.c", 2, NULL},
    {"statedict/save/save.c", 3, "statedict/save/load.c"},
    {"statedict/save/load.c", 3, "statedict/save/save.c"},
    {"statedict/ctl/ctl.c", 3, "statedict/ctl/ctl.c"},
    {"statedict/checkpoint/view.c", 3, NULL},
    {"statedict/commit/commit.c", 3, NULL},
    {"statedict/transfer/box_plan.c", 4, "statedict/transfer/box_plan.c"},
    {"statedict/transfer/pipeline.c", 5, "statedict/transfer/pipeline.c"},
    {"formats/native/native_write.c", 6, "formats/native/native_read.c"},
    {"formats/native/native_read.c", 6, "formats/native/native_write.c"},
    {"formats/native/native_write.c", 6, "formats/native/native_read.c"},
    {"statedict/convert/convert.c", 3, NULL},
    {"statedict/convert/convert_select.c", 3, NULL},
    {"statedict/convert/output_place.c", 3, NULL},
    {"formats/dcp/dcp_read.c", 6, NULL},
    {"formats/source/source_read.c", 6, NULL},
    {"formats/target/packed.c", 6, NULL},
    {"base/io/io.c", 7, "base/io/io.c"},
};
enum { STEPS = sizeof steps / sizeof steps[0], BOTTOM = 7, TOP = 3, PLAN = 4 };

static const struct step *step_of(const line *at)
{
    for (int i = 0; i < STEPS; i++)
        if (strcmp(steps[i].file, at->step) == 0)
            return &steps[i];
    report_problem("no step of the straight line", at->step);
    return &steps[0];
}

/* The lines of one rank, in order. */
static int lines_of(int rank, const line **lines)
{
    int count = 0;
    for (int i = 0; i < now.count; i++)
        if (now.lines[i].rank == rank)
            lines[count++] = &now.lines[i];
    return count;
}

static void check_step_count(const line *const *lines, int count)
{
    bool seen[STEPS] = {false};
    int distinct = 0;
    for (int i = 0; i < count; i++) {
        bool *known = &seen[step_of(lines[i]) - steps];
        distinct += !*known;
        *known = true;
    }
    if (distinct > MAX_STEPS || distinct < 5)
        report_problem("the number of steps is wrong", lines[0]->text);
}

/* Between two lines of save.c, commit.c or view.c, each line is of the same layer as the line before or of a
 * lower one. */
static void check_save_goes_down(const line *const *lines, int count)
{
    for (int i = 1; i < count; i++) {
        int level = step_of(lines[i])->level;
        if (level != TOP && level < step_of(lines[i - 1])->level)
            report_problem("a save goes uphill", lines[i]->text);
    }
}

/* Data only comes up: below the plan, a line follows one from further down, or is a read. */
static void check_load_comes_up(const line *const *lines, int count)
{
    for (int i = 1; i < count; i++) {
        int level = step_of(lines[i])->level;
        if (level > PLAN && level < BOTTOM && level >= step_of(lines[i - 1])->level)
            report_problem("a load goes downhill with data", lines[i]->text);
    }
}

static int find_line(const line *const *lines, int count, const char *text)
{
    for (int i = 0; i < count; i++)
        if (strncmp(lines[i]->text, text, strlen(text)) == 0)
            return i;
    report_problem("the trace lacks", text);
    return 0;
}

enum { WAY_ROOM = 8 };

/* The files that a box of one block passes, top to bottom: rank 1's way down. */
static int way_down(const struct step **way)
{
    const line *lines[MAX_LINES];
    int length = 0, count = lines_of(1, lines);
    int end = find_line(lines, count, "finish");
    for (int i = find_line(lines, count, "put 1"); i < end && length < WAY_ROOM; i++)
        way[length++] = step_of(lines[i]);
    return length;
}

/* The steps of a load on the last rank, which reads one stored box: from the lowest layer up. */
static int way_up(const struct step **way)
{
    const line *lines[MAX_LINES];
    int length = 0, count = lines_of(2, lines);
    int want = find_line(lines, count, "want"), got = find_line(lines, count, "got");
    for (int i = want + 1; i <= got && length < WAY_ROOM; i++)
        if (step_of(lines[i])->level != PLAN)
            way[length++] = step_of(lines[i]);
    return length;
}

static void check_mirror(const struct step *const *down, int down_length,
                         const struct step *const *up, int up_length)
{
    if (down_length != up_length || down_length < 4) {
        report_problem("the ways down and up differ", "in length");
        return;
    }
    for (int i = 0; i < down_length; i++)
        if (!down[i]->mirror || strcmp(down[i]->mirror, up[up_length - 1 - i]->file) != 0)
            report_problem("the way up does not mirror the way down", down[i]->file);
}

static void check_rules(int ranks, void (*check)(const line *const *lines, int count))
{
    const line *lines[MAX_LINES];
    for (int rank = 0; rank < ranks; rank++) {
        int count = lines_of(rank, lines);
        if (count == 0) {
            report_problem("a rank", "tells nothing");
            continue;
        }
        if (rank > 0) /* rank 0 also publishes, which is not on a shard's way */
            check_step_count(lines, count);
        check(lines, count);
    }
}

/* --- the page ------------------------------------------------------------------------------------ */

/* The writes of libhdf5 differ between its versions, so that a row of them counts as one. */
static bool is_library_write(const line *const *lines, int i)
{
    while (i > 0 && step_of(lines[i])->level == BOTTOM)
        i--;
    return strncmp(lines[i]->text, "lay out", 7) == 0;
}

/* A part of a page: a rank's lines from the first that begins with `from`, up to one that begins
 * with `until` (NULL: all), behind the fence "```flow NAME". */
typedef struct page_part {
    const char *name;
    int rank;
    const char *from, *until;
} page_part;

static void write_trace(const page_part *part, fsdp_text *out)
{
    const line *lines[MAX_LINES];
    int count = lines_of(part->rank, lines);
    if (part->until)
        count = find_line(lines, count, part->until) + 1;
    for (int i = find_line(lines, count, part->from); i < count; i++) {
        bool library = step_of(lines[i])->level == BOTTOM && is_library_write(lines, i);
        if (!library)
            fsdp_text_addf(out, "%-34s %s\n", lines[i]->step, lines[i]->text);
        else if (step_of(lines[i - 1])->level != BOTTOM)
            fsdp_text_addf(out, "%-34s %s\n", lines[i]->step, "(writes of libhdf5)");
    }
}

static void read_page(const char *path, fsdp_text *page)
{
    char buffer[4096];
    size_t n;
    FILE *file = fopen(path, "r");
    if (!file) {
        report_problem("cannot open", path);
        return;
    }
    while ((n = fread(buffer, 1, sizeof buffer, file)) > 0)
        fsdp_text_add(page, buffer, n);
    fclose(file);
}

static void replace_block(const char *path, const fsdp_text *page, const char *block, size_t size,
                          const fsdp_text *lines)
{
    FILE *file = fopen(path, "w");
    if (!file) {
        report_problem("cannot write", path);
        return;
    }
    fwrite(page->data, 1, (size_t)(block - page->data), file);
    fwrite(lines->data, 1, lines->size, file);
    fputs(block + size, file);
    fclose(file);
}

/* The block of a page must be the trace of that rank. */
static void compare_page(const char *path, page_part part, bool update)
{
    fsdp_text page = {0}, lines = {0};
    char fence[32];
    snprintf(fence, sizeof fence, "```flow %s\n", part.name);
    read_page(path, &page);
    write_trace(&part, &lines);
    char *block = page.data ? strstr(page.data, fence) : NULL;
    char *end = block ? strstr(block + strlen(fence), "```") : NULL;
    if (!end) {
        report_problem(path, "a block of the flow is missing");
    } else {
        block += strlen(fence);
        size_t size = (size_t)(end - block);
        bool same = size == lines.size && memcmp(block, lines.data, size) == 0;
        if (!same && update)
            replace_block(path, &page, block, size, &lines);
        else if (!same)
            report_problem(path,
                           "the flow is not what happens (to take it over: --update), which is");
        if (!same)
            fputs(lines.data, stderr);
    }
    fsdp_text_release(&page);
    fsdp_text_release(&lines);
}

/* --- the functions that a page names ------------------------------------------------------------- */

#define WORD "abcdefghijklmnopqrstuvwxyz_0123456789"

/* Is `function` defined in the text: named on a line that does not begin with a blank? */
static bool is_defined(const char *text, const char *function)
{
    size_t size = strlen(function);
    for (const char *at = text; (at = strstr(at, function)); at += size) {
        const char *start = at;
        while (start > text && start[-1] != '\n')
            start--;
        bool is_word = at > text && !strchr(WORD, at[-1]) && at[size] == '(';
        if (is_word && start[0] != ' ')
            return true;
    }
    return false;
}

static void check_function(const char *root, const char *file, const char *function)
{
    fsdp_text text = {0};
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, file);
    read_page(path, &text);
    if (text.data && !is_defined(text.data, function)) {
        snprintf(path, sizeof path, "%s:%s", file, function);
        report_problem("a page names a function that is not there", path);
    }
    fsdp_text_release(&text);
}

/* Every `folder/file.c:function` of the page must exist. */
static void check_functions(const char *root, const char *page_name, int least)
{
    char page_path[4096];
    fsdp_text page = {0};
    int found = 0;
    snprintf(page_path, sizeof page_path, "%s/docs/%s", root, page_name);
    read_page(page_path, &page);
    for (char *at = page.data; at && (at = strstr(at, ".c:")); at += 3) {
        char *start = at;
        while (start > page.data && start[-1] && strchr(WORD "/", start[-1]))
            start--;
        char file[200], function[200];
        snprintf(file, sizeof file, "%.*s", (int)(at + 2 - start), start);
        snprintf(function, sizeof function, "%.*s", (int)strspn(at + 3, WORD), at + 3);
        if (function[0] == '\0')
            continue;
        check_function(root, file, function);
        found++;
    }
    if (found < least)
        report_problem(page_path, "names hardly any function");
    fsdp_text_release(&page);
}

/* --- main ---------------------------------------------------------------------------------------- */

static void remove_folder(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0)
        report_problem("cannot remove", folder);
}

int main(int argc, char **argv)
{
    char save_page[4096], load_page[4096], convert_page[4096];
    const struct step *down[WAY_ROOM], *up[WAY_ROOM];
    bool update = argc == 3 && strcmp(argv[2], "--update") == 0;
    if (argc < 2 || (argc == 3 && !update)) {
        fputs("usage: flow_trace REPOSITORY [--update]\n", stderr);
        return 2;
    }
    strcpy(folder, "/tmp/fsdp-flow-XXXXXX");
    if (!mkdtemp(folder))
        return 2;
    snprintf(save_page, sizeof save_page, "%s/docs/flow_save.md", argv[1]);
    snprintf(load_page, sizeof load_page, "%s/docs/flow_load.md", argv[1]);
    snprintf(convert_page, sizeof convert_page, "%s/docs/flow_convert.md", argv[1]);
    run(2, save);
    check_rules(2, check_save_goes_down);
    int down_length = way_down(down);
    compare_page(save_page, (page_part){"rank 1", 1, "begin", NULL}, update);
    compare_page(save_page, (page_part){"rank 0", 0, "gather", NULL}, update);
    run_background();
    compare_page(save_page, (page_part){"background", 1, "copy", "begin"}, update);
    run(3, load);
    check_rules(3, check_load_comes_up);
    check_mirror(down, down_length, up, way_up(up));
    compare_page(load_page, (page_part){"rank 1", 1, "begin", NULL}, update);
    convert();
    compare_page(convert_page, (page_part){"rank 0", 0, "open", NULL}, update);
    check_functions(argv[1], "flow_convert.md", 20);
    check_functions(argv[1], "flow_save.md", 20);
    check_functions(argv[1], "flow_load.md", 15);
    check_functions(argv[1], "flow_step.md", 40);
    check_functions(argv[1], "architecture.md", 3);
    remove_folder();
    return problems ? 1 : 0;
}
