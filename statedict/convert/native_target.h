/* Native shard files as a conversion writes them: of a directory (native_target.c) or of one file
 * (one_file_target.c). See convert_job.h. */
#ifndef FSDP_NATIVE_TARGET_H
#define FSDP_NATIVE_TARGET_H

#include "statedict/convert/convert_job.h"

typedef struct native_files {
    fsdp_save_plan *plans;     /* per file */
    fsdp_shard_writer **writers;
    fsdp_file_record *records;
    fsdp_encoder *encoder;
    fsdp_resume notes;         /* of finished files */
} native_files;

/* Functions of convert_target_ops. */
fsdp_status fsdp_native_declare(convert_job *job, const fsdp_selection *selection, fsdp_error *err);
convert_room fsdp_native_room(const convert_job *job);
fsdp_status fsdp_native_measure(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err);
fsdp_status fsdp_native_list(convert_job *job, convert_part_visit visit, void *context, fsdp_error *err);
fsdp_status fsdp_native_create(convert_job *job, fsdp_error *err);
fsdp_status fsdp_native_write(convert_job *job, const convert_piece *piece, fsdp_error *err);
fsdp_status fsdp_native_finish(convert_job *job, fsdp_error *err);
fsdp_status fsdp_native_check(convert_job *job, fsdp_error *err);

/* Closes the files and frees their state; the bytes on the disk stay. */
void fsdp_native_release(convert_job *job);
/* The manifest of the result, without its file records. */
fsdp_manifest fsdp_native_manifest(const convert_job *job);

#endif
