package gantry.example;

import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.ErrorInfo;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;

/** Checks that Java decodes the golden corpus as Rust does. */
public final class Golden {
  private static final String SUFFIX = ".binpb";

  public static void main(String[] arguments) throws Exception {
    var registry = JsonFormat.TypeRegistry.newBuilder().add(ErrorInfo.getDescriptor()).build();
    List<Path> messages;
    try (var paths = Files.list(Path.of("../golden"))) {
      messages = paths.filter(path -> path.toString().endsWith(SUFFIX)).sorted().toList();
    }
    for (Path path : messages) {
      String stem = path.getFileName().toString().replace(SUFFIX, "");
      String name = stem.substring(0, stem.lastIndexOf('.')).replaceFirst("^google", "com.google");
      var message = (Message) Class.forName(name).getMethod("getDefaultInstance").invoke(null);
      Message decoded = message.newBuilderForType().mergeFrom(Files.readAllBytes(path)).build();
      Message.Builder expected = message.newBuilderForType();
      JsonFormat.parser().usingTypeRegistry(registry).merge(Files.readString(path.resolveSibling(stem + ".json")), expected);
      if (!decoded.equals(expected.build())) {
        throw new AssertionError("%s: decoded %s, expected %s".formatted(stem, decoded, expected.build()));
      }
    }
    if (messages.size() <= 25) {
      throw new AssertionError("only %d messages".formatted(messages.size()));
    }
    System.out.printf("golden: %d messages%n", messages.size());
  }
}
