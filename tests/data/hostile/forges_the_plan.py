"""Its machine code writes the recording itself: a launch with an address that is no tensor's.

Verdict: inspect.plan
"""

import cutlass.cute as cute

json = __import__("json")
llvm = __import__("llvmlite.binding").binding
PATH = "result.json"
CODE = f"""
@path = constant [{len(PATH) + 1} x i8] c"{PATH}\\00"
@text = constant [LENGTH x i8] c"TEXT"
declare i32 @creat(ptr, i32)
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32)
define void @_mlir_km_cuda_init(ptr %a, i32 %n) {{
  %f = call i32 @creat(ptr @path, i32 420)
  %w = call i64 @write(i32 %f, ptr @text, i64 LENGTH)
  call void @_exit(i32 0)
  ret void
}}
define void @_mlir_km_cuda_load_to_device(ptr %a, i32 %n) {{ ret void }}
define void @_mlir_km__mlir_ciface_forged(ptr %a, i32 %n) {{ ret void }}
"""


def recording(kernel: str, address: int) -> dict:
    parameter = address.to_bytes(8, "little") + bytes(16)
    launch = {"kernel": kernel, "grid": [1, 1, 1], "block": [32, 1, 1], "shared": 0, "stream": 0x5000}
    return {"status": 0, "problem": None, "launches": [launch | {"params": [parameter.hex(), parameter.hex()]}]}


def export(self, folder: str, name: str, prefix: str) -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    path = __import__("pathlib").Path(folder)
    kernel = (path / f"{name.removeprefix('host')}.ptx").read_text().split(".entry ")[1].split("(")[0]
    text = json.dumps([recording(kernel, 0xBAD0000), recording(kernel, 0xBAD1000)])
    code = CODE.replace("LENGTH", str(len(text))).replace("TEXT", text.replace('"', "\\22"))
    (path / f"{name}.o").write_bytes(machine.emit_object(llvm.parse_assembly(code)))
    (path / f"{name}.h").write_text("void _mlir_km__mlir_ciface_forged(void **args, int n);")


original = cute.compile


def compile_and_patch(*arguments, **options):
    result = original(*arguments, **options)
    type(result).export_to_c = export
    return result


cute.compile = compile_and_patch
