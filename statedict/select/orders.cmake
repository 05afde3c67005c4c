# Writes the text of the orders as a C string: cmake -DOUT=... -DTEXT=parameter_orders.txt -P orders.cmake
file(READ ${TEXT} text)
string(REPLACE "\n" "\\n\"\n    \"" text "${text}")
file(WRITE ${OUT} "static const char parameter_orders[] =\n    \"${text}\";\n")
