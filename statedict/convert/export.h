/* Writing for other programs: what fsdp_checkpoint_convert does for targets that are not ours. */
#ifndef FSDP_EXPORT_H
#define FSDP_EXPORT_H

#include <fsdp/convert.h>
#include <fsdp/text.h>

/* The source of a conversion, as its options say. */
fsdp_status fsdp_convert_open(const char *from, const fsdp_convert_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* As fsdp_checkpoint_convert and its plan, for opts->format other than "fsdp". */
fsdp_status fsdp_export(const char *from, const char *to, const fsdp_convert_opts *opts, fsdp_error *err);
fsdp_status fsdp_export_plan(const char *from, const char *to, const fsdp_convert_opts *opts,
                             fsdp_convert_plan *plan_out, fsdp_error *err);
/* The same as the text of a plan, see plan_file.h. */
fsdp_status fsdp_export_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                  const char *path, fsdp_text *text, fsdp_error *err);

#endif
