/*
 * A byte that flips between the write and the re-read of a conversion: at every byte of every file of the
 * result, right before the file is opened to be read back. The conversion fails and leaves the old
 * output; or the byte does not belong to the state, such as padding, and the new output holds the new state.
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { USUAL_SAMPLE = 120, MOST_FILES = 16 };

#define ROOT "/disk"

typedef struct counts {
    int64_t bytes, taken, found, other, wrong, unread;
} counts;

typedef struct result_file {
    char name[SCENARIO_PATH]; /* below the staging directory */
    int64_t size;
    int opens;     /* so far */
    int read_back; /* the number of the open that is for reading: nothing is written before the next */
    bool is_unread; /* nothing was written since the last open */
} result_file;

/* Flips byte `at` of a file when it is opened to be read back; or only lists the files. */
typedef struct flip {
    fsdp_io *disk;
    pthread_mutex_t lock;
    const result_file *file; /* NULL: lists */
    int64_t at;
    int opens;
    bool done;
    result_file files[MOST_FILES];
    int count;
} flip;

/* The name below the staging directory; NULL for other paths, and for files that are never published. */
static const char *name_in_result(const char *path)
{
    const char *staging = strstr(path, ".tmp-");
    const char *name = staging ? strchr(staging, '/') : NULL;
    return name && !strstr(name, "/.saving") && !strstr(name, "/.resume") ? name : NULL;
}

static int64_t size_of(fsdp_io *disk, const char *path)
{
    fsdp_file_info info;
    return disk->ops->info(disk, path, &info) == 0 && info.kind == FSDP_FILE_REGULAR ? info.size
                                                                                     : 0;
}

static void flip_byte(flip *f, const char *path)
{
    fsdp_file *file = NULL;
    unsigned char byte = 0;
    if (fsdp_io_open(f->disk, path, FSDP_IO_WRITE, &file, NULL) != FSDP_OK ||
        file->ops->pread(file, &byte, 1, f->at) != 1)
        abort();
    byte ^= (unsigned char)(1u << f->at % 8);
    if (fsdp_io_write(file, path, &byte, 1, f->at, NULL) != FSDP_OK ||
        fsdp_io_close(&file, path, NULL) != FSDP_OK)
        abort();
    f->done = true;
}

static void note_call(flip *f, fsdp_io_call call, const char *name, const char *path)
{
    int i = 0;
    while (i < f->count && strcmp(f->files[i].name, name) != 0)
        i++;
    if (i == MOST_FILES)
        abort();
    result_file *file = &f->files[i];
    if (i == f->count) {
        scenario_path(file->name, "%s", name);
        f->count++;
    }
    if (call == FSDP_CALL_OPEN) {
        if (file->is_unread && file->read_back == 0)
            file->read_back = file->opens;
        file->opens++;
        if (file->read_back == 0)
            file->size = size_of(f->disk, path);
    }
    file->is_unread = call == FSDP_CALL_OPEN;
}

static int before_call(void *user, fsdp_io_call call, const char *path)
{
    flip *f = user;
    const char *name = name_in_result(path);
    if (!name)
        return 0;
    pthread_mutex_lock(&f->lock);
    if (!f->file)
        note_call(f, call, name, path);
    else if (call == FSDP_CALL_OPEN && strcmp(f->file->name, name) == 0 &&
             ++f->opens == f->file->read_back)
        flip_byte(f, path);
    pthread_mutex_unlock(&f->lock);
    return 0;
}

static fsdp_status act(const scenario *s, flip *f, fsdp_error *err)
{
    fsdp_fault_plan plan = {.calls = 1u << FSDP_CALL_OPEN | 1u << FSDP_CALL_PWRITE,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = before_call,
                            .user = f};
    fsdp_io *io = NULL;
    FSDP_TRY(fsdp_io_fault_create(f->disk, &plan, &io, err));
    pthread_mutex_init(&f->lock, NULL);
    fsdp_status st = scenario_act(s, io, ROOT, err);
    pthread_mutex_destroy(&f->lock);
    fsdp_io_fault_free(io);
    return st;
}

static void tell(const scenario *s, const flip *f, const char *what, const fsdp_error *err)
{
    fprintf(stderr, "%s, byte %" PRId64 " of '%s' flipped: %s: %s\n", s->name, f->at,
            f->file ? f->file->name : "", what, err->text);
}

static void flip_at(const scenario *s, fsdp_io *prepared, const result_file *file, int64_t at,
                    counts *c)
{
    fsdp_error err = {0}, why = {0};
    flip f = {.disk = fsdp_sim_crash(prepared, 1), .file = file, .at = at};
    if (!f.disk)
        abort();
    fsdp_status st = act(s, &f, &err);
    scenario_found found = scenario_look(s, f.disk, ROOT, &why);
    scenario_found expected = st == FSDP_OK          ? FOUND_NEW
                              : scenario_is_fresh(s) ? FOUND_NOTHING
                                                     : FOUND_OLD;
    c->taken++;
    c->found += st != FSDP_OK;
    c->other += st == FSDP_OK;
    if (!f.done || found != expected || scenario_leftovers(s, f.disk, ROOT) > 0 ||
        (st != FSDP_OK && !strstr(err.text, ROOT))) {
        c->wrong++;
        tell(s, &f, st == FSDP_OK ? "reported as converted" : "failed",
             st == FSDP_OK ? &why : &err);
    }
    fsdp_sim_free(f.disk);
}

static bool prepare(const scenario *s, fsdp_io **sim_out, fsdp_error *err)
{
    return fsdp_sim_create(0, sim_out, err) == FSDP_OK &&
           fsdp_io_mkdir(*sim_out, ROOT, err) == FSDP_OK &&
           fsdp_io_sync_dir(*sim_out, "/", err) == FSDP_OK &&
           scenario_prepare(s, *sim_out, ROOT, err) == FSDP_OK;
}

static bool run_scenario(const scenario *s, test_sampler *sampler, counts *c)
{
    fsdp_io *sim = NULL;
    fsdp_error err = {0};
    flip list = {0};
    bool ok = prepare(s, &sim, &err);
    list.disk = ok ? fsdp_sim_crash(sim, 1) : NULL;
    ok = list.disk && act(s, &list, &err) == FSDP_OK;
    if (!ok)
        fprintf(stderr, "%s: %s\n", s->name, err.text);
    c->unread += ok && list.count == 0;
    for (int i = 0; ok && i < list.count; i++) {
        if (list.files[i].is_unread && list.files[i].read_back == 0)
            list.files[i].read_back = list.files[i].opens;
        if (list.files[i].read_back == 0) {
            /* the manifest and the view of a native checkpoint are not data */
            c->unread += s->format != NULL;
            continue;
        }
        c->bytes += list.files[i].size;
        for (int64_t at = 0; at < list.files[i].size; at++)
            if (test_sampler_takes(sampler))
                flip_at(s, sim, &list.files[i], at, c);
    }
    fsdp_sim_free(list.disk);
    fsdp_sim_free(sim);
    return ok;
}

/* Compression and other numbers of ranks change nothing about re-reading. */
static bool is_taken(const scenario *s)
{
    return s->work == WORK_CONVERT && !s->is_new && (s->format || (s->world == 2 && !s->compress));
}

int main(int argc, char **argv)
{
    counts c = {0};
    scenario s;
    bool ok = true;
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    for (int i = 0; scenario_next(&i, argc > 1 ? argv[1] : NULL, &s);)
        ok = (!is_taken(&s) || run_scenario(&s, &sampler, &c)) && ok;
    matrix_row row = {"a byte flipped between the write and the re-read of a conversion", "bytes",
                      c.taken, argc > 1 ? 0 : c.bytes, sampler.every};
    ok = matrix_row_print(&row,
                          ": found %" PRId64 ", none of the state %" PRId64
                          " | converted wrongly %" PRId64 ", not read again %" PRId64,
                          c.found, c.other, c.wrong, c.unread) &&
         ok;
    return ok && c.taken > 0 && c.wrong + c.unread == 0 ? 0 : 1;
}
