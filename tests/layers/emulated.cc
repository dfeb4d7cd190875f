// Calls the library's functions as XLA does, in a process for another processor. Calls come on
// standard input, results go to standard output: integers of 8 bytes, and strings behind their
// lengths.
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  int64_t num_threads;
};

extern "C" {
void ridgeline_use(const char*);
double ridgeline_try(const char*);
#define FUNCTIONS(DO)                                                \
  DO(linear) DO(grouped) DO(lookup) DO(attend) DO(scores) DO(bounds) \
  DO(norm) DO(gate) DO(summarize) DO(choose) DO(append) DO(gated) DO(zeros) \
  DO(update) DO(scan) DO(convolve)
#define DECLARE(name) XLA_FFI_Error* ridgeline_##name(XLA_FFI_CallFrame*);
FUNCTIONS(DECLARE)
#undef DECLARE
}

namespace {

void read_bytes(void* to, size_t size) {
  if (fread(to, 1, size, stdin) != size) _exit(0);  // there is nothing more to do
}
int64_t read_integer() {
  int64_t value;
  read_bytes(&value, sizeof value);
  return value;
}
std::string read_string() {
  std::string bytes(read_integer(), 0);
  read_bytes(bytes.data(), bytes.size());
  return bytes;
}
void write_string(const void* bytes, int64_t size) {
  fwrite(&size, sizeof size, 1, stdout);
  fwrite(bytes, 1, size, stdout);
}

// An array of XLA's, on a cache line of its own.
struct Array {
  XLA_FFI_Buffer buffer = {XLA_FFI_Buffer_STRUCT_SIZE};
  std::vector<int64_t> shape;
  std::vector<char> memory;
  size_t size = 0;

  void read_type() {
    buffer.dtype = (XLA_FFI_DataType)read_integer();
    shape.resize(read_integer());
    for (int64_t& size : shape) size = read_integer();
    buffer.rank = shape.size();
    buffer.dims = shape.data();
  }
  void read_size() {
    size = read_integer();
    memory.resize(size + 64);
    buffer.data = (void*)(((uintptr_t)memory.data() + 63) & -64);
  }
};

struct Attribute {
  std::string name, value;
  XLA_FFI_ByteSpan name_span, value_span;
  XLA_FFI_Scalar scalar;
  int64_t type;  // of a scalar; 0: a string

  void read() {
    name = read_string();
    type = read_integer();
    value = read_string();
    name_span = {name.data(), name.size()};
    value_span = {value.data(), value.size()};
    scalar = {(XLA_FFI_DataType)type, value.data()};
  }
};

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  std::thread(args->task, args->data).detach();
  return nullptr;
}
XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = args->ctx->num_threads;
  return nullptr;
}

XLA_FFI_Handler* find(const std::string& function) {
#define FIND(name) \
  if (function == #name) return ridgeline_##name;
  FUNCTIONS(FIND)
#undef FIND
  return nullptr;
}

void call(XLA_FFI_Handler* handler) {
  XLA_FFI_Api api = {XLA_FFI_Api_STRUCT_SIZE};
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_ThreadPool_NumThreads = count_threads;
  XLA_FFI_ExecutionContext context = {read_integer()};

  std::vector<Attribute> attributes(read_integer());
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  for (Attribute& attribute : attributes) {
    attribute.read();
    names.push_back(&attribute.name_span);
    attribute_types.push_back(attribute.type ? XLA_FFI_AttrType_SCALAR : XLA_FFI_AttrType_STRING);
    values.push_back(attribute.type ? (void*)&attribute.scalar : &attribute.value_span);
  }
  std::vector<Array> arguments(read_integer()), results(read_integer());
  std::vector<void*> argument_buffers, result_buffers;
  for (Array& argument : arguments) {
    argument.read_type();
    argument.read_size();
    read_bytes(argument.buffer.data, argument.size);
    argument_buffers.push_back(&argument.buffer);
  }
  for (Array& result : results) {
    result.read_type();
    result.read_size();
    result_buffers.push_back(&result.buffer);
  }
  std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);

  XLA_FFI_CallFrame frame = {XLA_FFI_CallFrame_STRUCT_SIZE};
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, (int64_t)arguments.size(), argument_types.data(),
                argument_buffers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, (int64_t)results.size(), result_types.data(),
                result_buffers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      (int64_t)attributes.size(),
                 attribute_types.data(),    names.data(), values.data()};
  const XLA_FFI_Error* error = handler(&frame);
  const std::string message = error ? error->message : "";
  delete error;
  write_string(message.data(), message.size());
  if (message.empty())
    for (const Array& result : results) write_string(result.buffer.data, result.size);
}

}  // namespace

int main() {
  for (;;) {
    const std::string function = read_string();
    if (XLA_FFI_Handler* handler = find(function)) {
      call(handler);
    } else if (function != "use" && function != "try") {
      fprintf(stderr, "there is no function %s here\n", function.c_str());
      _exit(1);
    } else {
      const std::string name = read_string();
      const double answer = ridgeline_try(name.c_str());
      if (function == "use" && answer >= 0) ridgeline_use(name.c_str());
      write_string(&answer, sizeof answer);
    }
    fflush(stdout);
  }
}
