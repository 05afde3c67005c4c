/*
 * A conversion writes the same state in another format, kind, world size, mesh or sharding dim, offline. All
 * calls are local, and one thread at a time may use a conversion.
 *
 *   fsdp_checkpoint_convert    converts in one call
 *
 *   fsdp_conversion_open       opens the source, selects and plans; writes nothing
 *     fsdp_conversion_plan         returns the plan
 *     fsdp_conversion_write_plan   writes the plan into a file
 *   fsdp_conversion_apply      opens the conversion of such a file, if its plan has not changed
 *     fsdp_conversion_run          moves, checks and publishes, once
 *     fsdp_conversion_result       visits the files that were written, with their digests
 *     fsdp_conversion_write_digests   writes digests next to the result
 *   fsdp_conversion_close      closes the source and frees the plan
 *
 *   fsdp_checkpoint_map        gives an opened checkpoint the names of another framework
 *
 * The source is opened once, by open or apply, and read until the close.
 */
#ifndef FSDP_CONVERT_H
#define FSDP_CONVERT_H

#include <fsdp/checkpoint.h>
#include <fsdp/format.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_only {
    FSDP_ONLY_DEFAULT = 0,     /* the model for hf and safetensors, else all */
    FSDP_ONLY_ALL,
    FSDP_ONLY_MODEL,
    FSDP_ONLY_OPTIM            /* fsdp_entry_is_optim */
} fsdp_only;

/* Selects entries and gives them new names and dtypes. Zero-initialised: all, as they are. */
typedef struct fsdp_select_opts {
    const char *include, *exclude;     /* POSIX extended regex over names */
    fsdp_only only;
    const char *part;          /* "ema": only names below this element, which is the first or the one after
                                * "app"; NULL: all */
    bool keep_names;           /* hf: keeps the key above the model ("model.") and wrappers ("_orig_mod.",
                                * "module.", ...) in names. Any rename has this effect, too */
    const char *const *drops;          /* "values", "opaque", "optim", "dtype:NAME", "tensors:KIND",
                                        * "metadata", "metadata:REGEX" over its keys, or a regex over names
                                        * (docs/man/fsdp-convert.1.scd) */
    size_t drop_count;
    const char *const *renames;        /* "s/REGEX/NEW/", applied in order */
    size_t rename_count;
    const char *under;         /* "model": new names that begin with it are in that dict; "app.model": in
                                * these nested dicts. NULL: dicts are those of the source */
    /* Floating types of the result, names of fsdp_castable_at. Only tensors of such a type are cast. */
    const char *dtype;                 /* of the model's tensors; NULL or "keep": as they are */
    const char *const *dtype_rules;    /* "REGEX=DTYPE" over names of the source, also of the optimizer; the
                                        * first that matches is used, and overrides dtype */
    size_t dtype_rule_count;
    fsdp_on_overflow on_overflow;      /* FAIL: FSDP_ERR_DAMAGED names the first value */
} fsdp_select_opts;

/* The effect of casts on the values of all tensors that were cast. */
typedef struct fsdp_cast_report {
    int64_t tensors;
    int64_t overflows;         /* finite values that did not fit */
    int64_t nans;              /* in the result */
    int64_t underflows;        /* values that became zero */
    double max_rounding;       /* the largest |new - old| / |old| of all others that are finite and not 0 */
    double max_underflow;      /* the largest |old| that became zero */
} fsdp_cast_report;

typedef enum fsdp_tied {
    FSDP_TIED_AUTO = 0,        /* hf and safetensors: one name of each tensor that the source declares to be
                                * tied, with a note of the others; other targets: every name */
    FSDP_TIED_KEEP,            /* every name, as a tensor or as the target's kind of alias */
    FSDP_TIED_DROP             /* one name, also of embeddings that are equal byte by byte */
} fsdp_tied;

/* How a "dcp" target stores hyper-parameters of optimizers. */
typedef enum fsdp_optim_form {
    FSDP_OPTIM_FORM_DEFAULT = 0,       /* nested if fsdp_root_save stored them, else as they are */
    FSDP_OPTIM_FORM_NESTED,    /* a list of groups [PyTorch's get_optimizer_state_dict] */
    FSDP_OPTIM_FORM_FLAT       /* each one per parameter [with flatten_optimizer_state_dict] */
} fsdp_optim_form;

/* The treatment of objects of unknown classes, whose code a program runs when it loads them. */
typedef enum fsdp_opaque {
    FSDP_OPAQUE_REFUSE = 0,    /* FSDP_ERR_USAGE names them */
    FSDP_OPAQUE_COPY
} fsdp_opaque;

typedef struct fsdp_convert_opts {
    const fsdp_sd *state;      /* the source in place of a path, which is NULL: its tensors are whole in this
                                * process (fsdp_sd_gather_full). Borrowed until the close */
    const char *format;        /* a name or alias of fsdp_format_to; NULL: "fsdp" */
    fsdp_open_opts open;       /* of the source; access is also that of the target */
    int64_t max_shard_bytes;   /* hf: limit on the bytes of tensors in a file; 0: its default */
    fsdp_kind kind;
    bool keep_full;            /* kind SHARDED: keeps a full source full, unless world or mesh is given */
    int world;                 /* ranks of the result; 0: 1 for full, else the source's */
    const fsdp_mesh *mesh;     /* NULL: one dim of `world` ranks */
    int shard_dim;             /* tensor dim that is cut (tensors with fewer dims: dim 0) */
    bool compress;
    int level;
    int64_t chunk_bytes;       /* compress: bytes of a chunk; 0: 1 MiB, or less where memory is short */
    bool skip_fsync;           /* leaves durability to the operating system */
    bool skip_view;            /* writes no index.h5 */
    bool skip_verify;          /* neither compares the source's checksums nor reads the result back */
    bool overwrite;            /* replaces what is at the target */
    fsdp_select_opts select;
    const char *adapter;       /* the directory of an adapter of PEFT (LoRA, DoRA) to merge; NULL: none */
    const char *dequant;       /* "bf16", "f32" or "f16": converts quantized weights (fp8 with scales, MXFP4)
                                * to this dtype; hf: also removes quantization_config from config.json. NULL:
                                * keeps them */
    const char *map;           /* names of another framework: a built-in map, or the path of a map file
                                * (docs/maps.md), in the direction that fits the source; "none": no map. NULL:
                                * for hf a built-in map that matches every tensor of the source and is for the
                                * model_type of the config.json, if there is one */
    const char *const *sizes;  /* "NAME=NUMBER": sizes that the map needs, in place of those that are found */
    size_t size_count;
    fsdp_cast_report *cast;    /* filled in by a run that succeeds; may be NULL */
    const char *copy_from;     /* hf: a directory whose config.json, tokenizer, licences and the like are
                                * copied next to the weights; config.json is edited to match the weights */
    bool copy_code;            /* also copies Python files */
    bool skip_copies;          /* hf, without copy_from: copies no files from the source's directory */
    fsdp_tied tied;
    fsdp_opaque opaque;
    fsdp_optim_form optim_form;        /* dcp; FSDP_ERR_USAGE for other formats */
    int threads;
    int64_t memory;
    bool resume;               /* continues an interrupted conversion of the same plan, and keeps its work if
                                * it is interrupted itself (plan.keeps_work) */
    int64_t bytes_per_second;  /* limit for reads, and for writes; 0: none */
    bool direct;               /* bypasses the page cache for reads if the file system can */
    fsdp_watch watch;
} fsdp_convert_opts;

/* --- a conversion in one call --- */

/* Converts `from` (NULL: opts->state) to `to`, which must not exist (FSDP_ERR_EXISTS) unless opts->overwrite.
 * The result is read back and compared by hash before it is published, unless opts->skip_verify; it appears
 * whole or not at all. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert(const char *from, const char *to,
                                                          const fsdp_convert_opts *opts, fsdp_error *err);

/* Returns the name of a format that can be written, "fsdp" first; NULL after the last. */
FSDP_API const char *fsdp_convert_format_at(size_t i);
/* Returns the format that the suffix of a path stands for; "hf" for any other path. */
FSDP_API const char *fsdp_convert_format_of(const char *path);

/* Returns the name of a dtype that tensors can be cast to; NULL after the last. Options also take the other
 * names of fsdp_dtype_from_typed. */
FSDP_API const char *fsdp_castable_at(size_t i);

/* --- plans --- */

/* The subjects of notes, in the order in which a plan lists them, each with the items of such a note. */
typedef enum fsdp_note_kind {
    FSDP_NOTE_STAGE,           /* derived tensors: the stage ("adapter", "dequant", "map", ...) */
    FSDP_NOTE_MAPPED,          /* a map that is used: its name, and the framework of the result */
    FSDP_NOTE_UNMAPPED,        /* a map that fits and is not used: the same */
    FSDP_NOTE_ENCODED,         /* count: tensors that become blocks (q8_0) */
    FSDP_NOTE_RENAMED,         /* count: names that change; the rules in effect */
    FSDP_NOTE_LEFT_OUT,        /* count: entries that only and part leave out; if the source has parts, "model
                                * 29 · ema 29 left out" and the part that --part would convert */
    FSDP_NOTE_DROPPED,         /* count: entries that drops leave out */
    FSDP_NOTE_CAST,            /* count: tensors; two dtypes and the number of their tensors */
    FSDP_NOTE_CODE,            /* objects that run code when they are loaded: name, class, bytes */
    FSDP_NOTE_TIED,            /* names that are left out, and the name that is kept */
    FSDP_NOTE_COPIED,          /* files next to the weights, and what changes in them */
    FSDP_NOTE_MODEL,           /* count: tensors that the model of config.json must have; its type, and how
                                * many are missing and allowed to be */
    FSDP_NOTE_EXTRA,           /* names of the result that the model does not have */
    FSDP_NOTE_UNREAD,          /* weight files in the source's directory that are not read */
    FSDP_NOTE_MISSING,         /* entries that are left out as incomplete */
    FSDP_NOTE_OPTIM,           /* the form of hyper-parameters in the result ("nested", "flat") */
    FSDP_NOTE_NUMBERED,        /* count: parameters that the optimizer numbers, and that get names */
    FSDP_NOTE_TOKENIZER,       /* the weights have no tokenizer that llama.cpp reads */
    FSDP_NOTE_ROUNDED,         /* count: weights of which the source has only rounded copies */
    FSDP_NOTE_TUPLES,          /* count: tensors in tuples, which the format stores as lists */
    FSDP_NOTE_CONFIG,          /* config.json is missing */
    FSDP_NOTE_METADATA,        /* keys of texts next to the tensors that the result lacks */
    FSDP_NOTE_DIRECTORY,       /* the target is a directory with the name of a file */
    FSDP_NOTE_ADDED,           /* names of tied tensors that loaders ask for */
    FSDP_NOTE_QUANTIZED,       /* count: weights of integers with scales, which are not converted */
    FSDP_NOTE_SHORT,           /* count: tensors without the dim that is cut */
    FSDP_NOTE_PREFIX,          /* a prefix of all names of the model */
    FSDP_NOTE_KINDS
} fsdp_note_kind;

typedef enum fsdp_note_level {
    FSDP_NOTE_LINE,            /* printed in a plan only */
    FSDP_NOTE_SAID,            /* also printed before a run, since the user may not expect it */
    FSDP_NOTE_IN_SHORT         /* printed before a run in place of the notes of its kind */
} fsdp_note_level;

typedef struct fsdp_note_item {
    const char *name, *other;
    size_t name_size, other_size;
    int64_t number;
} fsdp_note_item;

typedef struct fsdp_convert_note {
    fsdp_note_kind kind;
    fsdp_note_level level;
    int64_t count;             /* of what the kind's comment names, else of items */
    const fsdp_note_item *items;
    size_t item_count;
    const char *text;          /* sentences for the user, one per line; "": another note has the text */
} fsdp_convert_note;

/* The plan of a conversion; its memory lives until the conversion is closed. */
typedef struct fsdp_convert_plan {
    const fsdp_checkpoint *source;     /* as it was opened; NULL: it could not be opened, or a run failed */
    const fsdp_sd *sd;         /* its entries after adapters and under the names of the map */
    const char *to;
    const fsdp_convert_opts *opts;     /* in effect */
    bool keeps_work;           /* an interrupted run leaves work that opts->resume uses */
    bool may_overwrite;        /* the plan fails with FSDP_ERR_EXISTS, but not with opts->overwrite */
    int files;
    int world;                 /* ranks of the result */
    int64_t tensors, values, aliases;
    int64_t bytes_read, bytes_written, peak_memory, free_bytes;
    int64_t bytes_checked;     /* of the source, compared with checksums before any tensor is read; 0 without
                                * verification */
    int64_t bytes_spooled;     /* compressed data of the source that is read in another order than stored; it
                                * is unpacked into unnamed files next to `to` */
    int64_t bytes_needed;      /* free bytes that the result needs: tensors (unless compressed), metadata
                                * and a margin. 0 if the plan fails before it is computed */
    int64_t model_missing;     /* tensors that config.json asks for; the plan fails without them */
    const fsdp_convert_note *notes;
    size_t note_count;
    const fsdp_note_item *results;     /* per entry of sd: its name in the result, if it has one */
    size_t result_count;       /* without entries that the target adds (pairs of gguf), which follow */
    void *memory;              /* private: memory of the lists */
} fsdp_convert_plan;

/* --- a conversion in steps --- */

typedef struct fsdp_conversion fsdp_conversion;

/* Opens the source (NULL: opts->state) and plans; writes nothing, and fails for every reason for which a run
 * would fail before its first byte. Borrows strings and lists of opts until the close. The caller closes the
 * conversion also after a failure: it is NULL, or has an incomplete plan. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_open(const char *from, const char *to,
                                                       const fsdp_convert_opts *opts,
                                                       fsdp_conversion **conversion_out, fsdp_error *err);

/* Opens the conversion of a plan that fsdp_conversion_write_plan wrote. Takes paths and options from the
 * file; of opts it uses those that do not change the result: access, threads, memory, rate, direct, fsync,
 * verification, resume, cast and watch. FSDP_ERR_NOT_FOUND: the path has no plan. FSDP_ERR_DAMAGED: the plan
 * is damaged or of a newer version, or differs from the one that would be made now; the message names the
 * source file that has changed. The caller closes the conversion as after fsdp_conversion_open. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_apply(const char *path, const fsdp_convert_opts *opts,
                                                        fsdp_conversion **conversion_out, fsdp_error *err);

/* Returns the plan, which the conversion owns until the close; NULL for NULL. */
FSDP_API const fsdp_convert_plan *fsdp_conversion_plan(const fsdp_conversion *conversion);

/* Writes the plan with all details as JSON (docs/formats.md): source files with size and time, options,
 * outputs with their parts. Equal sources, paths and options give equal bytes; the file appears whole or not
 * at all. FSDP_ERR_EXISTS if `path` exists and is not a plan. Call it before the run. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_write_plan(fsdp_conversion *conversion, const char *path,
                                                             fsdp_error *err);

/* Converts as planned: moves the data, checks it and publishes the result, which appears whole or not at all.
 * Call it once. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_run(fsdp_conversion *conversion, fsdp_error *err);

/* Gets a file of the result: its name as sha256sum prints it in the directory that holds the result. name and
 * digest live for the call. */
typedef void (*fsdp_file_digest_visit)(void *context, const char *name, const uint8_t digest[32]);
/* Visits the files of the result with their SHA-256, in the order of their names. Call it after the run. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_result(fsdp_conversion *conversion,
                                                         fsdp_file_digest_visit visit, void *context,
                                                         fsdp_error *err);

/* Writes the digest file TO.xxh3 next to the result. Call it after the run. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_conversion_write_digests(fsdp_conversion *conversion, fsdp_error *err);

/* Closes the source and frees the plan; accepts NULL. */
FSDP_API void fsdp_conversion_close(fsdp_conversion *conversion);

/* --- names of another framework without a conversion --- */

typedef struct fsdp_map_opts {
    const char *map;           /* as in fsdp_convert_opts, but not "none"; NULL: names do not change */
    const char *const *sizes;
    size_t size_count;
    const char *other;         /* a checkpoint whose config.json is used if the mapped one has none; NULL:
                                * none */
} fsdp_map_opts;

/* Renames an opened checkpoint to the other side of the map, as a conversion with the map does: *checkpoint
 * becomes one whose tensors are computed while they are read, and whose quantized tensors of GGUF are
 * dequantized. Tensors that no rule matches keep their names. After a failure *checkpoint is closed and NULL.
 * */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_map(fsdp_checkpoint **checkpoint, const fsdp_map_opts *opts,
                                                      fsdp_error *err);

/* --- the options as data --- */

/* The type of an option's member. */
typedef enum fsdp_option_kind {
    FSDP_OPTION_TEXT,          /* const char * */
    FSDP_OPTION_PATH,          /* const char *; plans have it absolute */
    FSDP_OPTION_WORD,          /* an enumerator, the number of a word */
    FSDP_OPTION_INT,
    FSDP_OPTION_BYTES,         /* int64_t */
    FSDP_OPTION_FLAG,          /* bool */
    FSDP_OPTION_LIST,          /* const char *const *, and its size_t at count_offset */
    FSDP_OPTION_MESH           /* const fsdp_mesh * */
} fsdp_option_kind;

/* Parts of a help page. */
typedef enum fsdp_option_group {
    FSDP_OPTIONS_SOURCE = 1,
    FSDP_OPTIONS_TAKEN,
    FSDP_OPTIONS_NAMES,
    FSDP_OPTIONS_NUMBERS,
    FSDP_OPTIONS_TARGET,
    FSDP_OPTIONS_SAFETY,
    FSDP_OPTIONS_RUNNING
} fsdp_option_group;

typedef struct fsdp_convert_option {
    const char *name;          /* "world-size"; NULL: command lines do not have it as an option */
    const char *member;        /* "world_size", in a plan; NULL: it does not change the result */
    fsdp_option_kind kind;
    size_t offset, count_offset;       /* in fsdp_convert_opts */
    const char *const *words;  /* the possible values, up to NULL */
    const char *(*word_at)(size_t i);  /* replaces words, if another list has them */
    int first_word;            /* words before it stand for an option that is not given */
    bool takes_others;         /* TEXT: other values than the words are checked later */
    int64_t least, most;       /* INT and BYTES: the range, if the option is given */
    bool is_optional;          /* in a plan only if it is given, so that other plans keep their hash */
    bool is_negated;           /* FLAG: a plan has the opposite */
    fsdp_option_group group;
    bool is_usual;             /* on the first page of help */
    size_t capability;         /* offset in fsdp_caps: formats that have it accept the option; 0: all do */
    bool or_map;               /* with a map, all formats accept it */
    const char *value, *help;  /* "N", NULL for a flag; "ranks of the result" */
} fsdp_convert_option;

/* Returns a row of the table of options, from which command lines, plans and help pages are made. The rows of
 * a plan are first, in its order. NULL after the last. */
FSDP_API const fsdp_convert_option *fsdp_convert_option_at(size_t i);

#ifdef __cplusplus
}
#endif
#endif
