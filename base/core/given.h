/*
 * Arguments of public calls. A NULL object, name, path or output is FSDP_ERR_USAGE and names the argument;
 * options, and what a header calls so, may be NULL. Calls without a status return false, 0 or NULL instead.
 */
#ifndef FSDP_GIVEN_H
#define FSDP_GIVEN_H

#include <fsdp/status.h>
#include <stddef.h>

/* A status: FSDP_ERR_USAGE when one of these pointers to objects is NULL. */
#define FSDP_GIVEN(err, ...)                                                                        \
    fsdp_check_given(err, __func__, #__VA_ARGS__, (const void *const[]){__VA_ARGS__},               \
                     sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *))
/* As FSDP_GIVEN, for one callback. */
#define FSDP_GIVEN_CALL(err, call)                                                                  \
    fsdp_check_given(err, __func__, #call, (const void *const[]){(call) ? "" : NULL}, 1)

/* The first statement of a call: FSDP_NEED(err, model, spec). A collective call shares the status of a path
 * or a callback with the other ranks instead, since it may be NULL on one of them alone. */
#define FSDP_NEED(err, ...) FSDP_TRY(FSDP_GIVEN(err, __VA_ARGS__))
#define FSDP_NEED_CALL(err, call) FSDP_TRY(FSDP_GIVEN_CALL(err, call))

/* names: of the pointers, with ", " between them. FSDP_API: libfsdp_mpi calls it. */
FSDP_API fsdp_status fsdp_check_given(fsdp_error *err, const char *function, const char *names,
                                      const void *const *pointers, size_t count);

#endif
