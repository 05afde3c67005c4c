/*
 * The operations that the crash tests disturb: a save or conversion that replaces an old state by a new one,
 * and how to tell afterwards which of the two is there. Everything happens below `root` on any io.
 *
 *   work       before                            the act                      found after it
 *   fresh      nothing                           save ROOT/ck                 nothing or the new one
 *   overwrite  ROOT/ck                           save over it                 the old or the new one
 *   run        ROOT/run, steps 10 and 20         save step 30, keep last 2    step 20 or step 30
 *   convert    ROOT/from, and another ROOT/to    convert over ROOT/to         the old or the new one
 *   convert    ROOT/from                         convert to ROOT/to           nothing or the new one
 *   is_new
 */
#ifndef FSDP_SCENARIO_H
#define FSDP_SCENARIO_H

#include "base/io/io.h"
#include "tests/support/sample_state.h"

#include <fsdp/fsdp.h>

typedef enum scenario_work {
    WORK_RUN,
    WORK_OVERWRITE,
    WORK_CONVERT,
    WORK_FRESH,
    WORK_COUNT
} scenario_work;

typedef struct scenario {
    char name[80];
    scenario_work work;
    state_model model;
    int world;                 /* ranks, as threads, of the act (convert: of its result) */
    fsdp_kind kind;
    bool compress;
    const char *format;        /* convert: of ROOT/to; NULL: a native directory */
    bool is_new;               /* convert: there is no ROOT/to before */
} scenario;

/* The native ones first: all works, 1, 2 and 4 ranks, every kind, raw and compressed. Then conversions to
 * every other format, over an old output and to a new place. */
enum {
    SCENARIO_NATIVE = WORK_COUNT * 3 * 3 * 2,
    SCENARIO_FOREIGN = 6 * 2,
    SCENARIO_COUNT = SCENARIO_NATIVE + SCENARIO_FOREIGN
};
scenario scenario_at(int number);
/* The next one, from *number on, whose name has the words `only`, a test's first argument; NULL: any. */
bool scenario_next(int *number, const char *only, scenario *out);

/* True when there is nothing to lose: before the act there is no old state. */
bool scenario_is_fresh(const scenario *s);

fsdp_status scenario_prepare(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err);
fsdp_status scenario_act(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err);
/* The next save, by one rank; what it saved is there afterwards, and no leftover in a run. */
fsdp_status scenario_again(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err);

typedef enum scenario_found {
    FOUND_NOTHING,             /* *why says what loading says */
    FOUND_OLD,
    FOUND_NEW,
    FOUND_LATER,               /* what scenario_again saves */
    FOUND_WRONG                /* loaded, and not one state bit for bit; *why tells */
} scenario_found;

/* Loads what is there and compares every byte. look also checks what the act must not touch: the other steps
 * of a run, the source of a conversion. */
scenario_found scenario_load(const scenario *s, fsdp_io *io, const char *root, fsdp_error *why);
scenario_found scenario_look(const scenario *s, fsdp_io *io, const char *root, fsdp_error *why);

/* True when nothing is lost and nothing mixed: old, new or later; nothing only where nothing was. */
bool scenario_is_whole(const scenario *s, scenario_found found);

/* Staging directories and other halves below root. */
int scenario_leftovers(const scenario *s, fsdp_io *io, const char *root);

/* A folder of its own for a test, in memory when the system has such a place; and its removal. */
bool scenario_folder(char *path_out, size_t room);
void scenario_remove(const char *path);

/* snprintf for paths, which must fit. */
enum { SCENARIO_PATH = 400 };
const char *scenario_path(char out[SCENARIO_PATH], const char *format, ...) FSDP_PRINTF(2, 3);

#endif
