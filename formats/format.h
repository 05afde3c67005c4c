/*
 * Describes the formats of checkpoints. A format is a room of formats/ that describes itself by one
 * fsdp_format: its names, the paths that it reads and writes, and what it can do. The library and the tools
 * ask for a capability, and never for a name. All calls are local, any thread may make them, and formats live
 * as long as the process.
 *
 * formats/detect/format_list.inc lists the formats: to add one, add its room and a line there.
 */
#ifndef FSDP_FORMAT_H
#define FSDP_FORMAT_H

#include <fsdp/status.h>

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a format can do. All false: it holds tensors with names, and nothing else. */
typedef struct fsdp_caps {
    /* The entries that it holds. */
    bool values;               /* null, bool, numbers, strings, bytes, lists, dicts */
    bool opaque;               /* objects of classes, and tensors inside values, as blobs (OPAQUE) */
    bool classes;              /* values with objects of classes inside them */
    bool aliases;              /* a second name of a tensor is an entry without elements of its own */
    bool shares;               /* tensors with several names are stored once */
    bool metadata;             /* texts next to the tensors, as safetensors has them */
    bool nameless;             /* one tensor, whose name is not kept */
    bool tuples;               /* paths of names tell tuples from lists */
    bool lists_tuples;         /* a tuple that holds a tensor becomes a list */
    bool regroups;             /* a list or dict of values may become one name per value, or the reverse */
    bool takes_under;          /* names may be put below a key */
    bool in_items;             /* every tensor is below a key of letters, digits, - and _: others get one */

    /* Its purpose: the names, dtypes and further entries that its loaders ask for. */
    bool model_only;           /* optimizer state is written only on request */
    bool model_part;           /* of what a trainer keeps, only the model is written (model_part.h) */
    bool for_loaders;          /* names are those that the model's loader asks for */
    bool plain_names;          /* names are the model's own, and optim.state, optim.param_groups */
    bool maps_names;           /* names are those of a framework: a map that fits is applied */
    bool notes_ties;           /* other names of a tensor, which are left out, are noted with the tensor */
    bool all_names;            /* its loaders ask for every name of a tied tensor */
    bool names_groups;         /* hyper-parameters of optimizers are written as PyTorch asks for them */
    bool nests_groups;         /* by default they are a list of groups, whatever program stored them */
    bool forms_groups;         /* the user chooses their form: nested or flat */
    bool f32_vectors;          /* floating tensors of fewer than two dims, biases and the like are f32 */
    bool f32_weights;          /* all floating tensors outside the optimizer are f32 */
    bool takes_config;         /* the model's config.json decides how it is written */
    bool needs_config;         /* writing fails without a config.json */
    bool checks_config;        /* names are compared with the config.json of a source that is a directory */
    bool copies_files;         /* files of a model, such as config.json, are copied next to the weights */
    bool adds_objects;         /* its framework loads objects that go with the tensors of a map */

    /* Its files. */
    bool sharded;              /* files are split over ranks: tensors have boxes */
    bool has_kinds;            /* there is a sharded and a full kind, with or without a view */
    bool compresses;           /* blocks are compressed on request */
    bool splits_files;         /* files have at most a given size */

    /* Its reader. */
    bool patterns;             /* a pattern of file names ("{r}") opens it, and not only a path */
    bool only_model;           /* all tensors outside the optimizer belong to the model */
    bool only_tensors;         /* the model has no values, so that all values belong to the trainer; the keys
                                * of dicts of values are texts */
    bool notes_aliases;        /* aliases are notes in the metadata, not names of the file's tensors */
    bool repeats;              /* files hold the same weights several times, and the exact ones are read */
    bool numbered;             /* the state of an optimizer may have numbers in place of names */
    bool keeps_order;          /* the order of entries is that of the model's parameters */
    bool takes_model;          /* a model (--like) may give the shapes that the files lack */
    bool takes_void;           /* elements may be bytes without a type */
    bool whole_chunks;         /* one chunk may take all of the memory */
    bool without_config;       /* trainers usually write it without the config.json of the model */
} fsdp_caps;

/* A format. The same bytes may have two: "hf" is a directory of safetensors files. */
typedef struct fsdp_format {
    const char *name;
    const char *alias;         /* a further name of the target, or NULL */
    const char *suffixes[4];   /* of paths that are written in this format (".pt"), up to NULL */
    const char *base;          /* the format that becomes this one if the model has its layout or the path its
                                * suffix; NULL: none */
    const char *makes;         /* regular expression of names of values that its writer adds; NULL: none */
    bool reads_file, reads_directory, writes_file, writes_directory;
    fsdp_caps caps;
    const struct fsdp_format_reader *reader;   /* private: source.h. NULL: the native format, or none */
    const struct fsdp_format_writer *writer;   /* private: target.h. NULL: it is not written */
} fsdp_format;

/* Returns format number i, in the order of the help; NULL after the last. */
FSDP_API const fsdp_format *fsdp_format_at(size_t i);
/* Returns the format of a checkpoint, by a name of fsdp_checkpoint_info; NULL if none has that name. */
FSDP_API const fsdp_format *fsdp_format_from(const char *name);
/* Returns the format that is written under this name or alias; NULL if there is none. */
FSDP_API const fsdp_format *fsdp_format_to(const char *name);

#ifdef __cplusplus
}
#endif

#endif
