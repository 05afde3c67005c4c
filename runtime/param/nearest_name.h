/* Which of the names that are there was meant? For messages about one that is not: names of modules in
 * options are typed by hand. */
#ifndef FSDP_NEAREST_NAME_H
#define FSDP_NEAREST_NAME_H

#include <fsdp/model.h>

enum { FSDP_NEAREST_NAME = 255 };      /* longer names are never near to anything */

/* Initialise with what was asked for: {.wanted = "layer.0"}. */
typedef struct fsdp_nearest_name {
    const char *wanted;
    char name[FSDP_NEAREST_NAME + 1];  /* of those that were offered; "" before there was one */
    int distance;                      /* letters to be changed */
} fsdp_nearest_name;

void fsdp_nearest_name_offer(fsdp_nearest_name *nearest, const char *name, size_t size);
/* The parameter's names, or the modules that these lie in. */
void fsdp_nearest_name_offer_param(fsdp_nearest_name *nearest, const fsdp_param *param);
void fsdp_nearest_name_offer_modules(fsdp_nearest_name *nearest, const fsdp_param *param);

#endif
