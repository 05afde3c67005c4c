/* The functions of libcurl that libhdf5 calls when it reads from S3, which no test does. */
#include <stdlib.h>

_Noreturn void curl_easy_cleanup(void);
_Noreturn void curl_easy_init(void);
_Noreturn void curl_easy_perform(void);
_Noreturn void curl_easy_setopt(void);
_Noreturn void curl_global_cleanup(void);
_Noreturn void curl_global_init(void);
_Noreturn void curl_slist_append(void);
_Noreturn void curl_slist_free_all(void);

void curl_easy_cleanup(void)
{
    abort();
}

void curl_easy_init(void)
{
    abort();
}

void curl_easy_perform(void)
{
    abort();
}

void curl_easy_setopt(void)
{
    abort();
}

void curl_global_cleanup(void)
{
    abort();
}

void curl_global_init(void)
{
    abort();
}

void curl_slist_append(void)
{
    abort();
}

void curl_slist_free_all(void)
{
    abort();
}
