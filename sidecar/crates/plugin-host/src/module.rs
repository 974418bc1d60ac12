//! Inspection of a module before it is compiled: validity, size limits, imports and exports.

use ronde_plugin_abi::{limits, names};
use sha2::{Digest as _, Sha256};
use wasmparser::types::{EntityType, TypesRef};
use wasmparser::{Parser, Payload, ValType, ValidPayload, Validator, WasmFeatures};

use crate::error::{LoadError, one_line, too_long};
use crate::manifest::{Manifest, Shape};

/// The properties of a module, found without running it.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// SHA-256 of the whole file.
    pub digest: [u8; 32],
    /// The parsed manifest.
    pub manifest: Manifest,
    /// The manifest as it is written in the file.
    pub manifest_json: String,
    /// Imports, as `module name`.
    pub imports: Vec<String>,
    /// Exports: name and type.
    pub exports: Vec<(String, String)>,
    /// Number of functions.
    pub functions: usize,
    /// Bytes of code.
    pub code_bytes: usize,
    /// Initial bytes of memory; the size is fixed.
    pub memory_bytes: u64,
}

/// Inspects a module without running it.
///
/// # Errors
/// [`LoadError`] with the violated rule.
pub fn inspect(bytes: &[u8]) -> Result<Inspection, LoadError> {
    too_long("the whole file", bytes.len(), limits::MODULE_BYTES_MAX)?;
    let mut found = ModuleSections::default();
    let mut validator = Validator::new_with_features(FEATURES);
    let mut allocations = wasmparser::FuncValidatorAllocations::default();
    let mut types = None;
    for payload in Parser::new(0).parse_all(bytes) {
        let payload = payload.map_err(|error| invalid(&error))?;
        if matches!(payload, Payload::Version { encoding: wasmparser::Encoding::Component, .. }) {
            return Err(LoadError::Invalid("it is a component; build a core module, without wit or wasi".to_owned()));
        }
        found.record(&payload)?;
        match validator.payload(&payload).map_err(|error| invalid(&error))? {
            ValidPayload::Func(function, body) => {
                let mut function = function.into_validator(allocations);
                function.validate(&body).map_err(|error| invalid(&error))?;
                allocations = function.into_allocations();
            }
            ValidPayload::End(end) => types = Some(end),
            ValidPayload::Ok | ValidPayload::Parser(_) => {}
        }
    }
    let types = types.ok_or_else(|| LoadError::Invalid("it is truncated".to_owned()))?;
    found.conclude(types.as_ref(), Sha256::digest(bytes).into())
}

/// The name in a module's manifest. Nothing else is checked.
///
/// # Errors
/// [`LoadError`] if the manifest cannot be read.
pub fn name(bytes: &[u8]) -> Result<String, LoadError> {
    let mut manifests = Vec::new();
    for payload in Parser::new(0).parse_all(bytes) {
        match payload.map_err(|error| invalid(&error))? {
            Payload::CustomSection(section) if section.name() == names::MANIFEST => manifests.push(section.data()),
            _ => {}
        }
    }
    let [manifest] = manifests[..] else { return Err(LoadError::Manifests { found: manifests.len() }) };
    Ok(Manifest::parse(manifest)?.name)
}

/// The features that rustc and clang emit for plain modules: no threads, relaxed SIMD, 64-bit memories, exceptions or
/// garbage collection.
pub(crate) const FEATURES: WasmFeatures = WasmFeatures::MUTABLE_GLOBAL
    .union(WasmFeatures::SATURATING_FLOAT_TO_INT)
    .union(WasmFeatures::SIGN_EXTENSION)
    .union(WasmFeatures::REFERENCE_TYPES)
    .union(WasmFeatures::CALL_INDIRECT_OVERLONG)
    .union(WasmFeatures::MULTI_VALUE)
    .union(WasmFeatures::BULK_MEMORY)
    .union(WasmFeatures::BULK_MEMORY_OPT)
    .union(WasmFeatures::SIMD)
    .union(WasmFeatures::FLOATS);

/// What is collected from the sections of a module.
#[derive(Default)]
struct ModuleSections<'a> {
    manifests: Vec<&'a [u8]>,
    imports: Vec<(&'a str, &'a str)>,
    import_kinds: Vec<wasmparser::TypeRef>,
    exports: Vec<wasmparser::Export<'a>>,
    functions: usize,
    code_bytes: usize,
}

impl<'a> ModuleSections<'a> {
    fn record(&mut self, payload: &Payload<'a>) -> Result<(), LoadError> {
        match payload {
            Payload::CustomSection(section) if section.name() == names::MANIFEST => {
                self.manifests.push(section.data());
            }
            Payload::ImportSection(section) => {
                for import in section.clone().into_imports() {
                    let import = import.map_err(|error| invalid(&error))?;
                    self.imports.push((import.module, import.name));
                    self.import_kinds.push(import.ty);
                }
            }
            Payload::ExportSection(section) => {
                for export in section.clone() {
                    self.exports.push(export.map_err(|error| invalid(&error))?);
                }
            }
            Payload::TableSection(section) => {
                for table in section.clone() {
                    let elements = table.map_err(|error| invalid(&error))?.ty.initial;
                    let elements = usize::try_from(elements).unwrap_or(usize::MAX);
                    too_long("elements of a table", elements, limits::TABLE_ELEMENTS_MAX)?;
                }
            }
            Payload::CodeSectionEntry(body) => self.record_function(body)?,
            _ => {}
        }
        Ok(())
    }

    /// Limits the size of functions: the time to compile one grows faster than its size.
    fn record_function(&mut self, body: &wasmparser::FunctionBody<'a>) -> Result<(), LoadError> {
        let bytes = body.range().len();
        self.functions += 1;
        self.code_bytes += bytes;
        too_long("one function", bytes, limits::FUNCTION_BYTES_MAX)?;
        too_long("all functions", self.code_bytes, limits::CODE_BYTES_MAX)?;
        let mut locals = 0_usize;
        for local in body.get_locals_reader().map_err(|error| invalid(&error))? {
            let (count, _) = local.map_err(|error| invalid(&error))?;
            locals = locals.saturating_add(count as usize);
        }
        too_long("a function's locals", locals, limits::LOCALS_MAX)
    }

    fn conclude(self, types: TypesRef<'_>, digest: [u8; 32]) -> Result<Inspection, LoadError> {
        let [manifest_json] = self.manifests[..] else {
            return Err(LoadError::Manifests { found: self.manifests.len() });
        };
        let manifest = Manifest::parse(manifest_json)?;
        for ((module, name), kind) in self.imports.iter().zip(&self.import_kinds) {
            let is_log = (*module, *name) == (names::IMPORTS, names::LOG);
            if !(is_log && is_function(types, *kind, &[ValType::I32; 2], &[])) {
                return Err(LoadError::Import { module: one_line(module), name: one_line(name) });
            }
        }
        let exports: Vec<(&str, EntityType)> = self
            .exports
            .iter()
            .filter_map(|export| Some((export.name, types.entity_type_from_export(export)?)))
            .collect();
        let memory_bytes = memory(&exports, &manifest)?;
        for (name, wanted) in functions(&manifest) {
            check_function(types, &exports, name, wanted)?;
        }
        Ok(Inspection {
            digest,
            manifest_json: String::from_utf8_lossy(manifest_json).into_owned(),
            manifest,
            imports: self.imports.iter().map(|(module, name)| one_line(&format!("{module} {name}"))).collect(),
            exports: exports.iter().map(|(name, kind)| (one_line(name), type_text(types, *kind))).collect(),
            functions: self.functions,
            code_bytes: self.code_bytes,
            memory_bytes,
        })
    }
}

/// The initial size of the module's memory in bytes.
fn memory(exports: &[(&str, EntityType)], manifest: &Manifest) -> Result<u64, LoadError> {
    let memory = exports.iter().find(|(name, _)| *name == names::MEMORY);
    let Some((_, EntityType::Memory(memory))) = memory else {
        let found = memory.map_or("nothing", |_| "something that is no memory").to_owned();
        return Err(LoadError::Export { name: names::MEMORY, found, wanted: "its memory" });
    };
    let bytes = memory.initial.saturating_mul(PAGE_BYTES);
    if bytes > manifest.limits.memory_bytes as u64 {
        return Err(LoadError::Wants {
            what: "bytes of memory in its module",
            wanted: bytes,
            granted: manifest.limits.memory_bytes as u64,
        });
    }
    Ok(bytes)
}

/// Whether a function must be exported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Requirement {
    Required,
    Optional,
}

/// The functions that a plugin must or may export, by its kinds.
fn functions(manifest: &Manifest) -> Vec<(&'static str, Requirement)> {
    let mut functions = vec![names::ABI, names::PLACE, names::CONFIGURE];
    let mut optional = Vec::new();
    if manifest.codec.is_some() {
        functions.extend([names::BOUND, names::ENCODE, names::DECODE]);
    }
    if let Some(reducer) = &manifest.reducer {
        functions.push(names::REDUCE);
        match reducer.shape {
            Shape::Pairwise | Shape::Nary => {}
            Shape::TwoPass { .. } => {
                functions.push(names::MEASURE);
                optional.push(names::CONCLUDE);
            }
            Shape::Adaptive => functions.push(names::CONCLUDE),
        }
    }
    let required = functions.into_iter().map(|name| (name, Requirement::Required));
    required.chain(optional.into_iter().map(|name| (name, Requirement::Optional))).collect()
}

fn check_function(
    types: TypesRef<'_>,
    exports: &[(&str, EntityType)],
    name: &'static str,
    need: Requirement,
) -> Result<(), LoadError> {
    let (params, wanted): (&[ValType], _) =
        if name == names::BOUND { (&[ValType::I32], "(i32) -> i32") } else { (&[], "() -> i32") };
    let found = match exports.iter().find(|(exported, _)| *exported == name) {
        None if need == Requirement::Optional => return Ok(()),
        None => "nothing".to_owned(),
        Some((_, kind)) if has_type(types, *kind, params, &[ValType::I32]) => return Ok(()),
        Some((_, kind)) => type_text(types, *kind),
    };
    Err(LoadError::Export { name, found, wanted })
}

fn is_function(types: TypesRef<'_>, kind: wasmparser::TypeRef, params: &[ValType], results: &[ValType]) -> bool {
    let wasmparser::TypeRef::Func(index) = kind else { return false };
    let function = types[types.core_type_at_in_module(index)].unwrap_func();
    function.params() == params && function.results() == results
}

fn has_type(types: TypesRef<'_>, kind: EntityType, params: &[ValType], results: &[ValType]) -> bool {
    let EntityType::Func(id) = kind else { return false };
    let function = types[id].unwrap_func();
    function.params() == params && function.results() == results
}

/// A type in the notation of the documentation.
fn type_text(types: TypesRef<'_>, kind: EntityType) -> String {
    let EntityType::Func(id) = kind else {
        let what = match kind {
            EntityType::Memory(_) => "a memory",
            EntityType::Global(_) => "a global",
            EntityType::Table(_) => "a table",
            _ => "something else",
        };
        return what.to_owned();
    };
    let function = types[id].unwrap_func();
    let list = |list: &[ValType]| list.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let results = list(function.results());
    format!("({}) -> {}", list(function.params()), if results.is_empty() { "()" } else { &results })
}

fn invalid(error: &wasmparser::BinaryReaderError) -> LoadError {
    LoadError::Invalid(format!("{} (at byte {})", one_line(error.message()), error.offset()))
}

/// Bytes of a page of WebAssembly's memories.
const PAGE_BYTES: u64 = 64 << 10;
