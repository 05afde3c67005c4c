/* The existing name that is nearest to a missing one, for error messages: users type the names of modules by
 * hand. */
#ifndef FSDP_NEAREST_NAME_H
#define FSDP_NEAREST_NAME_H

#include <fsdp/model.h>

enum { FSDP_NEAREST_NAME = 255 };      /* longer names are not compared */

/* Initialise with the missing name: {.wanted = "layer.0"}. */
typedef struct fsdp_nearest_name {
    const char *wanted;
    char name[FSDP_NEAREST_NAME + 1];  /* the nearest offered so far; "" before the first */
    int distance;                      /* its edit distance */
} fsdp_nearest_name;

void fsdp_nearest_name_offer(fsdp_nearest_name *nearest, const char *name, size_t size);
/* The parameter's names, or the modules that these lie in. */
void fsdp_nearest_name_offer_param(fsdp_nearest_name *nearest, const fsdp_param *param);
void fsdp_nearest_name_offer_modules(fsdp_nearest_name *nearest, const fsdp_param *param);

#endif
