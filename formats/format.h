/*
 * The formats of checkpoints. A format is a room of formats/ that describes itself by one fsdp_format: its
 * names, the paths that it reads and writes, and what it can do. The library and the tools ask for a
 * capability, and never for a name.
 *
 * formats/detect/format_list.inc lists the formats: a new one is its room and a line there.
 */
#ifndef FSDP_FORMAT_H
#define FSDP_FORMAT_H

#include <fsdp/status.h>

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Capabilities of a format. All false: tensors with names, and nothing else. */
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

    /* Its purpose: the names, dtypes and further entries that its loaders ask for. */
    bool model_only;           /* optimizer state only on request */
    bool model_part;           /* nor what else a trainer keeps next to the model (model_part.h) */
    bool for_loaders;          /* under the names that the model's loader asks for */
    bool plain_names;          /* names of the model as it has them, and optim.state, optim.param_groups */
    bool maps_names;           /* names are those of a framework: a map that fits is applied */
    bool notes_ties;           /* another name of a tensor, which is left out, is noted with that */
    bool all_names;            /* its loaders ask for every name of a tied tensor */
    bool names_groups;         /* hyper-parameters of optimizers are written as PyTorch asks for them */
    bool nests_groups;         /* by default they are a list of groups, whoever stored them */
    bool forms_groups;         /* the user chooses their form: nested or flat */
    bool f32_vectors;          /* floating tensors of fewer than two dims, and biases, are f32 */
    bool f32_weights;          /* all floating tensors outside the optimizer are f32 */
    bool takes_config;         /* the model's config.json says how it is written */
    bool needs_config;         /* nothing is written without one */
    bool checks_config;        /* names are compared with the config.json of a source that is a directory */
    bool copies_files;         /* files of a model, such as config.json, are copied next to the weights */
    bool adds_objects;         /* its framework loads objects that go with the tensors of a map */

    /* Its files. */
    bool sharded;              /* split over ranks: tensors have boxes */
    bool has_kinds;            /* sharded or full, with or without a view for other programs */
    bool compresses;           /* in blocks, on request */
    bool splits_files;         /* of at most a given size */

    /* Its reader. */
    bool patterns;             /* a pattern of file names ("{r}") opens it, and not only a path */
    bool only_model;           /* tensors outside the optimizer are the model's, whatever their names */
    bool only_tensors;         /* the model has no values, so that those are the trainer's; dicts of values
                                * have texts as keys */
    bool notes_aliases;        /* aliases are notes in the metadata, not names of the file's tensors */
    bool repeats;              /* files hold the same weights several times, and the exact ones are read */
    bool numbered;             /* the state of an optimizer may have numbers in place of names */
    bool keeps_order;          /* the order of entries is that of the model's parameters */
    bool takes_model;          /* a model may say the shapes that the files lack */
    bool takes_void;           /* elements may be bytes without a type */
    bool whole_chunks;         /* one chunk may take all of the memory */
    bool without_config;       /* trainers leave it, mostly without the config.json of the model */
} fsdp_caps;

/* A format. Some bytes have two: "hf" is a directory of files of safetensors. */
typedef struct fsdp_format {
    const char *name;
    const char *alias;         /* a further name of the target, or NULL */
    const char *suffixes[4];   /* of paths that are written in it (".pt"), up to NULL */
    const char *base;          /* the format that becomes this one, for a model in its layout or a path with
                                * its suffix; NULL: none */
    const char *makes;         /* regular expression of names of values that its writer makes; NULL: none */
    bool reads_file, reads_directory, writes_file, writes_directory;
    fsdp_caps caps;
    const struct fsdp_format_reader *reader;   /* private: source.h. NULL: the native format, or none */
    const struct fsdp_format_writer *writer;   /* private: target.h. NULL: it is not written */
} fsdp_format;

/* Returns format number i, in the order in which people see them; NULL after the last. */
FSDP_API const fsdp_format *fsdp_format_at(size_t i);
/* Returns the format of a checkpoint, by a name of fsdp_checkpoint_info; NULL: none has that name. */
FSDP_API const fsdp_format *fsdp_format_from(const char *name);
/* Returns the format that is written under this name or alias; NULL: none is. */
FSDP_API const fsdp_format *fsdp_format_to(const char *name);

#ifdef __cplusplus
}
#endif

#endif
