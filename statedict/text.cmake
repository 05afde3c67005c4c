# Writes a text file as a C string: cmake -DOUT=... -DNAME=parameter_orders -DTEXT=... -P text.cmake
file(READ ${TEXT} text)
string(REPLACE "\n" "\\n\"\n    \"" text "${text}")
file(WRITE ${OUT} "static const char ${NAME}[] =\n    \"${text}\";\n")
