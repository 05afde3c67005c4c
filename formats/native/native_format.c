/*
 * The native format as the list of formats has it: a directory, and a full checkpoint in one file. statedict
 * reads both as "fsdp" and writes them itself (statedict/checkpoint, statedict/convert).
 */
#include "formats/target.h"

static bool holds_every_dtype(fsdp_dtype dtype)
{
    (void)dtype;
    return true;
}

static const fsdp_format_writer writer = {.holds_dtype = holds_every_dtype};

const fsdp_format fsdp_format_native = {.name = "fsdp",
                                        .suffixes = {".fsdp"},
                                        .reads_file = true,
                                        .reads_directory = true,
                                        .writes_directory = true,
                                        .caps = {.values = true,
                                                 .opaque = true,
                                                 .classes = true,
                                                 .aliases = true,
                                                 .metadata = true,
                                                 .tuples = true,
                                                 .takes_under = true,
                                                 .sharded = true,
                                                 .has_kinds = true,
                                                 .compresses = true},
                                        .writer = &writer};

const fsdp_format fsdp_format_native_file = {.name = "fsdp-file",
                                             .alias = "hdf5",
                                             .suffixes = {".h5", ".hdf5"},
                                             .writes_file = true,
                                             .caps = {.values = true,
                                                      .opaque = true,
                                                      .classes = true,
                                                      .aliases = true,
                                                      .metadata = true,
                                                      .compresses = true},
                                             .writer = &writer};
