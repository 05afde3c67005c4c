/*
 * The sandbox of the child process in which libhdf5 reads files of other programs: resource limits and a
 * list of allowed system calls (hdf5_session.c starts the child).
 */
#ifndef FSDP_HDF5_SANDBOX_H
#define FSDP_HDF5_SANDBOX_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Prefix of the refusal where system calls cannot be limited. */
#if FSDP_HAVE_SECCOMP
#define FSDP_HDF5_NO_SANDBOX "this kernel refuses seccomp"
#else
#define FSDP_HDF5_NO_SANDBOX "this build has no libseccomp"
#endif

enum { FSDP_HDF5_CPU_SECONDS = 60 };              /* of one request */
#define FSDP_HDF5_MEMORY ((int64_t)1 << 30)       /* above the process's usage when the child began */

/* In the child: closes every descriptor but *channel (whose number changes) and enters the sandbox, which is
 * limits and seccomp (FSDP_ERR_REFUSED where kernel or build has none) or, with limits_only, limits alone. */
fsdp_status fsdp_hdf5_sandbox_enter(int *channel, bool limits_only, fsdp_error *err);

#endif
