/* The error that this thread printed last, for the launcher: the text of a rank whose body then returns its
 * code. No function forwards errors by this. */
#ifndef FSDP_REPORTED_H
#define FSDP_REPORTED_H

#include <fsdp/status.h>

/* Returns it, and forgets it; FSDP_OK: there is none. */
fsdp_error fsdp_error_take_reported(void);

#endif
