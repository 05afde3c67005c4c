/* Queries about a path that formats make before one of them opens it: see fsdp_probe in
 * source.h. */
#include "formats/source.h"

#include <stdlib.h>
#include <string.h>

static int compare_name(const void *name, const void *entry)
{
    return strcmp(name, *(const char *const *)entry);
}

bool fsdp_probe_has(const fsdp_probe *probe, const char *name)
{
    return probe->is_directory && probe->name_count > 0 &&
           bsearch(name, probe->names, probe->name_count, sizeof *probe->names, compare_name);
}
