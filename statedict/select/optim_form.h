/*
 * Hyper-parameters of optimizers in the form that PyTorch's get_optimizer_state_dict asks for: nested, a
 * list of groups with the names of their parameters, or flat, every member once per parameter.
 *
 * In: the description of a target and the form that the caller wants. Out: a description whose entries
 * below "param_groups" have that form; tensors and all other entries stay. convert_select.c calls it for
 * targets of PyTorch, after relayout.h. Local and without I/O.
 */
#ifndef FSDP_OPTIM_FORM_H
#define FSDP_OPTIM_FORM_H

#include <fsdp/convert.h>
#include <fsdp/sd.h>

/*
 * form DEFAULT: nested if all groups are as fsdp_root_save stores them, else they stay as they are. Groups
 * that fsdp_root_save has stored get the members that PyTorch's AdamW and SGD have next to ours, with their
 * neutral values.
 *
 * Replaces *sd and *source, an array with the number of the source's entry per entry of *sd; new entries
 * have that of an entry they come from. written_out: the form of the result, DEFAULT if nothing changed.
 * FSDP_ERR_USAGE: groups that the form cannot hold. On failure nothing changes.
 */
fsdp_status fsdp_optim_form_apply(fsdp_optim_form form, fsdp_sd **sd, size_t **source,
                                  fsdp_optim_form *written_out, fsdp_error *err);

#endif
